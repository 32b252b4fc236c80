"""The code of a refused combination ends its message; other errors have none."""

import sys
from pathlib import Path

import pytest

from tutti.cli.main import main


@pytest.mark.parametrize(
    ("mesh", "ending"),
    [
        ("stage=2,space=2", "with replicate or shard [spatial-with-stages]\n"),
        ("stage=2,stage=2", "stage appears twice; name each axis once\n"),
    ],
)
def test_a_refused_combination_prints_its_code(
    mesh: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[2] / "examples" / "digits_tutti.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tutti", "plan", "--explain", "--mesh", mesh, str(script)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.endswith(ending)
    assert error.count("\n") == 1
