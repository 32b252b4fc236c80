"""What a run over ssh refuses, in words, with real sshd's; and what is brought to hosts that lack it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from clusters.ssh_rig import SshHosts, make_noisy, missing_for_ssh
from launch.launch_rig import TUTTI, wait_until
from tutti.clusters import driver_job, ssh, ssh_agent
from tutti.clusters.cluster_job import JobRequest, read_record
from tutti.clusters.local_files import moved_word
from tutti.clusters.profile_file import read_profile, with_requests
from tutti.clusters.ssh import Ssh
from tutti.clusters.ssh_driver import Results
from tutti.clusters.ssh_hosts import SshHost, SshSettings, bash_script, read_hosts, read_ssh_settings, ssh_command
from tutti.clusters.ssh_prepare import PreparedHost, prepare_hosts
from tutti.commands.run_options import RunOptions
from tutti.commands.submit import states, submit_run
from tutti.errors import LaunchError

needs_sshd = pytest.mark.skipif(missing_for_ssh() is not None, reason=str(missing_for_ssh()))


def refused(folder: Path, hosts: SshHosts, **settings: Any) -> list[str]:
    """The lines in which a run is refused."""
    project, run = folder / "my project", folder / "run"
    for made in (project, run):
        made.mkdir(exist_ok=True)
    (project / "train.py").touch()
    given: dict[str, Any] = {
        "hosts": "alpha:1,beta:1",
        "config": str(hosts.config),
        "directory": str(hosts.disk / "code"),
    }
    script = settings.pop("script", "train.py")
    request = JobRequest(
        name="train", folder=run, directory=project, words=(script,), script=script, nodes=2, settings=given | settings
    )
    with pytest.raises(LaunchError) as caught:
        Ssh().submit(request)
    assert not (run / "ssh.log").exists(), "no driver was started"
    return str(caught.value).splitlines()


def config_of(hosts: SshHosts, folder: Path, host: str, *lines: str) -> str:
    """A file of ssh settings in which some of one host's are others."""
    path = folder / "config"
    own = "".join(f"    {line}\n" for line in lines)
    path.write_text(f"Host {host}\n{own}\n{hosts.config.read_text()}")
    return str(path)


@needs_sshd
def test_each_host_that_cannot_be_reached_says_why(tmp_path: Path, hosts: SshHosts) -> None:
    (tmp_path / "nobody").touch()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    key = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    places = hosts.base.joinpath("known_hosts").read_text().splitlines()
    (tmp_path / "changed").write_text("".join(f"{line.split()[0]} {key}\n" for line in places))
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    for lines, said in (
        ((f"UserKnownHostsFile {tmp_path / 'nobody'}",),
         ("beta: its host key is not known here; connect once by hand (`ssh -F ", "add it to known_hosts")),
        ((f"UserKnownHostsFile {tmp_path / 'changed'}",),
         ("beta: its host key is another than the one known here", "ssh-keygen -R beta")),
        ((f"IdentityFile {tmp_path / 'other'}", f"IdentityFile {tmp_path / 'other'}", "IdentityAgent none"),
         ("beta: it does not let you in without a password (", "Permission denied (publickey)", "`ssh-copy-id beta`")),
        ((f"Port {free}",), ("beta: no sshd listens there (", "Connection refused", "--request port=N")),
        (("HostName no-such-host.invalid",), ("beta: its name is not known here; correct it in --hosts",)),
        (("ProxyCommand sleep 60",), ("beta: it cannot be reached (", "check that it is up")),
    ):  # fmt: skip
        config = config_of(hosts, tmp_path, "beta", *lines)
        if "IdentityFile" in lines[0]:  # identities of several matching blocks add up
            text = hosts.config.read_text().replace(str(hosts.base / "key"), str(tmp_path / "other"))
            alpha, beta = text.split("\n\n")
            alpha = alpha.replace(str(tmp_path / "other"), str(hosts.base / "key"))
            Path(config).write_text(f"{alpha}\n\n{beta}")
        (line,) = refused(tmp_path, hosts, config=config, options=("-o ConnectTimeout=2",))
        for part in said:
            assert part in line


@needs_sshd
def test_all_hosts_say_what_they_lack_at_once(tmp_path: Path, hosts: SshHosts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    config = config_of(hosts, tmp_path, "beta", f"Port {free}")
    lines = refused(
        tmp_path, hosts, config=config, setup=("PATH=/nowhere",), script=str(hosts.on("alpha") / "x" / "../y.py")
    )
    assert lines[0].startswith("alpha: rsync is not installed there; install it, or copy what is committed")
    assert lines[1].startswith("alpha: there is no ")
    assert "and only what is below " in lines[1]
    assert lines[2].startswith("beta: no sshd listens there")
    assert len(lines) == 3


@needs_sshd
def test_pythons_and_directories_that_will_not_do_are_named(tmp_path: Path, hosts: SshHosts) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2\nexit 1\n')
    old.chmod(0o755)
    other = tmp_path / "site/torch-1.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    (tmp_path / "file").touch()
    here = "{}.{}".format(*sys.version_info)
    for settings, said in (
        ({"python": "/no/python"}, f"there is no /no/python, and Python {here}, as here is needed"),
        ({"python": str(old)}, f"{old} is Python 3.9.2 there, and Python {here}, as here is needed; correct"),
        ({"python": str(bare / "bin/python")}, "lacks torch, numpy, pydantic"),
        ({"setup": (f"export PYTHONPATH='{other.parent}'",)}, "torch is 1.0 there and 2."),
        ({"setup": ("true", "module load nothing 2>/dev/null")}, "setup line 2 failed (module load nothing"),
        ({"setup": ("echo 'a\" # b' & wait # c", "if", "export KEY=k")}, "setup line 2 failed (if); correct"),
        ({"setup": ("set -eu; cat; read -r x || true", "exit 3")}, "setup line 2 failed (exit 3); correct"),
        ({"directory": str(tmp_path / "file/code")}, "cannot be used there (Not a directory); name another one"),
        ({"sync": "none", "directory": "/none"}, "the directory /none cannot be used there (missing); name "),
        ({"options": ("-o Nonsense=1",)}, "ssh does not take its settings ("),
    ):  # fmt: skip
        lines = refused(tmp_path, hosts, **settings)
        assert [line.partition(":")[0] for line in lines] == ["alpha", "beta"]
        for line in lines:
            assert said in line, line


@needs_sshd
def test_a_full_disk_is_named_whatever_fills_it(tmp_path: Path, hosts: SshHosts) -> None:
    project = tmp_path / "my project"
    project.mkdir()
    (project / "data").write_bytes(os.urandom(300_000))
    lines = refused(tmp_path, hosts, directory=str(hosts.small / "code"))
    assert [line.partition(":")[0] for line in lines] == ["alpha", "beta"]
    assert f"the code could not be copied to {hosts.small}/code (No space left on device); free space there" in lines[0]
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(project)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    shutil.rmtree(tmp_path / "run")
    lines = refused(tmp_path, hosts, directory=str(hosts.small / "other"), sync="git")
    assert (
        f"the code could not be copied to {hosts.small}/other (No space left on device); free space there" in lines[0]
    )


@needs_sshd
def test_a_shell_that_prints_is_named_where_rsync_fails_on_it(tmp_path: Path, hosts: SshHosts) -> None:
    noise = make_noisy(hosts, "beta")
    try:
        (line,) = refused(tmp_path, hosts)
    finally:
        noise.unlink()
    assert line.startswith("beta: its shell prints something when it starts, which rsync does not bear; ")


@needs_sshd
def test_the_command_refuses_in_one_sentence(tmp_path: Path, hosts: SshHosts) -> None:
    (tmp_path / "train.py").touch()
    for words, said in (
        (("--hosts", "alpha:1", "--request", f"config={hosts.config},sync=git"), "git has no archive of "),
        (("--hosts", "alpha:1", "--nproc", "2"), "--nproc 2 contradicts the hosts, which have 1 ranks; leave one out"),
        (("--hosts", "alpha,beta"), "--nnodes 2 needs the ranks per node; add --nproc N"),
        (("--hosts", "alpha:1", "--nnodes", "2"), "--nnodes 2 is more than the 1 hosts that are named"),
        (("--on", "local", "--hosts", "alpha:1"), "--hosts is for other hosts, and --on is local"),
        (("--on", "slurm", "--hosts", "alpha:1"), "--hosts is for --on ssh or mpi, and --on is slurm"),
        (("--on", "ssh"), "no hosts are named; write --hosts node0:8,node1:8"),
        (("--dry-run",), "--dry-run is for other hosts, and --on is local"),
    ):
        done = subprocess.run(
            [*TUTTI, "run", "--folder", "run", *words, "train.py"], cwd=tmp_path, capture_output=True, text=True,
            check=False, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_what_comes_back_stays_in_the_run_folder(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    results = Results(run, several=False, names={"/there/runs/run-1a": str(run), "runs/run-1a": "run"})
    results.say("alpha", b"--resume runs/ru")
    results.say("alpha", b"n-1a or /there/runs/run-1a\n")
    assert capfdbinary.readouterr().out == f"--resume run or {run}\n".encode()
    for name in ("../x", "/x", "a/../../x", ".lock", "", "checkpoints/step-1/part"):
        results.put(name, 0, b"1", last=True)
    results.publish("../../step-1")
    results.put("ranks/0/stdout.log", 0, b"ab", last=True)
    results.put("ranks/0/stdout.log", 2, b"c", last=True)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["run/checkpoints/step-1/part", "run/ranks/0/stdout.log"], (
        "an unpublished checkpoint has another name"
    )
    assert (run / "ranks/0/stdout.log").read_bytes() == b"abc"


def test_hosts_are_read_from_texts_lists_and_files(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# the rack\nnode0:8\nme@node1   slots=4   # older\n\n[fd00::1]:2\n")
    expected = [("node0", 8), ("me@node1", 4), ("[fd00::1]", 2)]
    for stated in ("hosts", "node0:8, me@node1:4,[fd00::1]:2", ("node0:8", "me@node1:4,[fd00::1]:2")):
        found = read_hosts(SshSettings(hosts=stated), tmp_path)
        assert [(host.address, host.ranks) for host in found] == expected
    requested = with_requests({}, ["hosts=a:1,b:2,port=3"])
    assert requested == {"hosts": "a:1,b:2", "port": "3"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hosts": "node0:0"}, "'node0:0' is no host; write user@host:RANKS"),
        ({"hosts": "-oProxyCommand=x"}, "is no host"),
        ({"hosts": "a:1,b"}, "only some hosts have a number of ranks"),
        ({"hosts": "a:1,a:2"}, "names a twice; name it once, with the ranks of both"),
        ({"hosts": "./none"}, "the file of hosts "),
        ({"hosts": "a", "speed": 1}, "ssh has no setting 'speed'; settings are hosts, port"),
        ({"hosts": "a", "port": 0}, "ssh setting port: "),
        ({"hosts": "a", "sync": "cp"}, "ssh setting sync: "),
    ],
)
def test_settings_that_cannot_be_right(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_hosts(read_ssh_settings(settings), tmp_path)
    assert said in str(caught.value)


_HOST = """
while read -r line; do
    case $line in *'"cancel"'*) echo 'tutti-frame {"kind": "end", "size": 0, "code": 130}';; esac
done
"""


def test_ctrl_c_while_the_driver_starts_leaves_no_job_without_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is a real one; in place of ssh, it starts a shell that only knows how to end."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    read, asked = driver_job.DRIVERS.read, []

    def interrupted(name: str) -> Any:
        asked.append(name)
        if len(asked) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return read(name)

    def start(self: Ssh, request: JobRequest) -> str:
        task = {"name": "alpha", "command": ["bash", "-c", _HOST], "script": "", "request": {"python_path": ""}}
        job = {
            "folder": str(request.folder),
            "grace_s": 1,
            "restarts": False,
            "failover": False,
            "hosts": [task],
            "places": [],
            "names": {},
        }
        return driver_job.start_driver("tutti.clusters.ssh_driver", job, request.folder / ssh.LOG, 20)

    monkeypatch.setattr(driver_job.DRIVERS, "read", interrupted)
    monkeypatch.setattr(Ssh, "submit", start)
    options = RunOptions(target=("train.py",), folder=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        submit_run(options, ["train.py"], on="ssh", hosts="alpha:1")
    (state,) = states([tmp_path / "run"]).runs
    assert (state.job, state.state) == (read_record(tmp_path / "run").job, "cancelled")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    asked.clear()
    monkeypatch.setattr(driver_job.DRIVERS, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):  # where Ctrl-C is not held back
        start(Ssh(), JobRequest(name="", folder=tmp_path, directory=tmp_path, words=()))
    assert asked
    assert not psutil.pid_exists(int(asked[0].partition("-")[0]))


@needs_sshd
def test_what_git_ignores_is_not_copied_and_the_copy_is_private(
    tmp_path: Path, hosts: SshHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, run = tmp_path / "repository", tmp_path / "run"
    project = repository / "my project"
    for made in (run, project / "data/kept", project / "inner", repository / "cache"):
        made.mkdir(parents=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C"]
    (repository / ".gitignore").write_text("*.key\n!public.key\nmy project/data/*\n!my project/data/kept\n")
    (tmp_path / "excludes").write_text(".env\n")
    (project / "inner/.gitignore").write_text("secret\n")
    names = (
        "train.py",
        "a.key",
        "public.key",
        "tracked.key",
        ".env",
        "note",
        "we[ir]*d.key",
        "data/big",
        "data/kept/a",
    )
    for name in (*names, "inner/secret", "inner/code.py", "new.py"):
        (project / name).touch()
    for folder in (repository, project / "inner"):
        subprocess.run([*git, str(folder), "init", "-q"], check=True)
    subprocess.run([*git, str(repository), "config", "core.excludesFile", str(tmp_path / "excludes")], check=True)
    (repository / ".git/info/exclude").write_text("note\n")
    subprocess.run([*git, str(repository), "add", "-f", "my project/tracked.key", "my project/train.py"], check=True)
    subprocess.run([*git, str(repository), "commit", "-qm", "all"], check=True)
    request = JobRequest(
        name="train", folder=run, directory=project, words=("train.py", "note"), script="train.py",
        settings={"hosts": "alpha:1", "config": str(hosts.config)},
    )  # fmt: skip
    needs = ssh._needs(request, read_ssh_settings(request.settings), read_hosts(SshSettings(hosts="alpha:1"), run), "r")
    (host,), shared = prepare_hosts(needs, print)
    if shared:  # as these hosts see this disk
        needs = replace(needs, settings=needs.settings.model_copy(update={"sync": "rsync"}))
        (host,), _ = prepare_hosts(needs, print)
    copy = Path(host.directory)
    assert copy.stat().st_mode & 0o777 == copy.parent.stat().st_mode & 0o777 == 0o700
    found = {path.relative_to(copy).as_posix() for path in copy.rglob("[!.]*") if path.is_file()}
    expected = {"train.py", "note", "public.key", "tracked.key", "data/kept/a", "inner/code.py", "new.py"}
    assert (copy / "inner/.gitignore").exists()
    assert not (copy / ".env").exists()
    assert found == expected
    (project / "new.py").unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    process, name = psutil.Process(), driver_job.job_name(os.getpid())
    state = {"machine": socket.gethostname(), "pid": process.pid, "since": process.create_time(), "state": "running",
             "reason": "", "nodes": "", "exit_code": None, "places": [host.copy]}  # fmt: skip
    driver_job.DRIVERS.folder.mkdir(parents=True)
    driver_job.DRIVERS.file(name).write_text(json.dumps(state))
    with pytest.raises(LaunchError, match=f"^alpha: ssh job {name} still runs the code in {copy}, which a copy would"):
        prepare_hosts(needs, print)
    assert (copy / "new.py").exists()
    driver_job.DRIVERS.file(name).write_text(json.dumps(state | {"exit_code": 0}))
    prepare_hosts(needs, print)
    assert not (copy / "new.py").exists(), "what is removed here is removed there"


@pytest.mark.parametrize("shell", ["bash", "tcsh"])
def test_the_script_is_on_no_command_line_and_its_setup_lines_count(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    setup = ("export KEY='a \"b\" ! c' # a comment", "cd /tmp &\nwait")
    settings = SshSettings(hosts="a", python="~/bin/python", setup=setup)
    command = ssh_command(settings, read_hosts(settings, tmp_path)[0])[-1]
    assert "KEY" not in command
    code = b"import os; print(os.environ['KEY'], s.read())"
    done = subprocess.run(
        [shell, "-c", command], input=b"%b%d\n%brest" % (bash_script(settings), len(code), code),
        capture_output=True, check=False, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"a \"b\" ! c b'rest'\n", b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_interpreter_and_a_package_that_others_can_change_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, digest = tmp_path / "place", "0123"
    (place / "tutti").mkdir(parents=True)
    (place / "tutti/a.py").write_text("1")
    digest = ssh_agent.package_digest(place / "tutti")
    (place / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    code = b"print(sys.executable)"

    def chosen() -> bytes:
        script = bash_script(SshSettings(hosts="a"))
        done = subprocess.run(
            ["sh", "-c", ssh_command(SshSettings(), SshHost(address="a"))[-1]],
            input=b"%b%d\n%b" % (script, len(code), code), capture_output=True, check=False,
        )  # fmt: skip
        return done.stdout

    assert chosen() == f"{place}/python\n".encode()
    assert ssh_agent._find_package("tutti", digest, [str(place)])[0] == str(place)
    tmp_path.chmod(0o777)
    assert not chosen().startswith(str(place).encode())
    assert not ssh_agent._find_package("tutti", digest, [str(place)])[0]
    tmp_path.chmod(0o755)
    os.lchown(place / "python", 12345, 12345)
    os.chown(place / "tutti/a.py", 12345, 12345)
    assert not chosen().startswith(str(place).encode())
    assert not ssh_agent._find_package("tutti", digest, [str(place)])[0]


def test_long_lists_words_and_homes_of_nobody_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ",".join(f"a-host-with-a-name-{number}:1" for number in range(300))
    assert len(read_hosts(SshSettings(hosts=listed[:3900].rpartition(",")[0]), tmp_path)) > 100
    with pytest.raises(LaunchError, match=r"the file of hosts .*~nosuchuser/hosts cannot be read"):
        read_hosts(SshSettings(hosts="~nosuchuser/hosts"), tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"{tmp_path}/config" in ssh_command(SshSettings(config="~/config"), SshHost(address="a"))
    (tmp_path / "deep").mkdir()
    (tmp_path / "rack").write_text("a:1\n")
    (tmp_path / "tutti.toml").write_text('[ssh]\nhosts = "rack"\n')
    assert read_profile(tmp_path / "deep").ssh["hosts"] == str(tmp_path / "rack")


def test_paths_in_words_are_those_of_the_copy_however_they_are_written(tmp_path: Path) -> None:
    here, link = tmp_path / "project", tmp_path / "link"
    (here / "in").mkdir(parents=True)
    link.symlink_to(here)
    for name in ("project/plan", "beside"):
        (tmp_path / name).touch()
    words = (f"--root={here}", str(here), f"{link}/in", f"--x={here}/in/../plan", f"{here}/../beside", "in/../plan",
             "../project/plan", "../beside", "--y=../beside", "in/../../beside", f"{here}-2", "a" * 5000)  # fmt: skip
    request = JobRequest(name="", folder=tmp_path, directory=here, words=words)
    assert [moved_word(word, here, "/there") for word in words[:6]] == [
        "--root=/there", "/there", "/there/in", "--x=/there/plan", f"{here}/../beside", "in/../plan",
    ]  # fmt: skip
    assert moved_word(words[10], here, "/there") == f"{here}-2"
    assert ssh._files(request) == ("plan", "plan", "plan")
    assert ssh._outside(request) == ("../beside", "in/../../beside")


def test_a_driver_of_another_machine_without_a_sign_of_life_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(driver_job, "_BEAT_S", 0.01)
    driver_job.save_state(replace(driver_job.own_state("running", "", "a,b", None), machine="login1"))
    name = driver_job.job_name(os.getpid())
    file = driver_job.DRIVERS.file(name)
    assert driver_job.job_status(name).state == "running"
    old = file.stat().st_mtime - 400
    os.utime(file, (old, old))
    found = driver_job.job_status(name)
    assert (found.state, found.exit_code) == ("unknown", None)
    assert found.reason == "its driver on login1 has given no sign of life for 7 minutes; ask there"
    driver_job.give_signs_of_life()
    assert wait_until(lambda: driver_job.job_status(name).state == "running", 10)


def test_failures_of_an_earlier_start_are_removed_also_from_a_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = PreparedHost(
        host=SshHost(address="a"), python_path="", directory=str(tmp_path), folder=str(tmp_path), first_of=0, resume="",
        address="10.0.0.1", outside="", port=1234,
    )  # fmt: skip
    monkeypatch.setattr(ssh, "prepare_hosts", lambda *_: ([place], True))
    monkeypatch.setattr(ssh, "start_driver", lambda *_: "1-1")
    (tmp_path / "ranks/0").mkdir(parents=True)
    (error := tmp_path / "ranks/0/error.json").write_text("{}")
    request = JobRequest(
        name="x", folder=tmp_path, directory=tmp_path, words=("t.py",), script="t.py", settings={"hosts": "a:1"}
    )
    assert Ssh().submit(request) == "1-1"
    assert not error.exists()
