"""Scripts that leave a loop because of the time are told from those that only read a clock."""

import pytest

from tutti.trainer.run_header import clock_exit

TIMED = {
    "difference": "import time\nt = time.time()\nfor b in x:\n    if time.time() - t > 60:\n        break",
    "alias": "from time import perf_counter as pc\nend = pc() + 9\n\nwhile pc() < end:\n    s()",
    "name": "import time\nt0 = time.time()\ne = time.time() - t0\nif e > 5 and i > 3:\n    raise SystemExit",
    "method": "import time\ndef over(): return time.monotonic() > 3\n\nif self.over():\n    exit()",
    "datetime": "from datetime import datetime\nd = datetime.now()\n\nif (datetime.now() - d).seconds > 3:\n    quit()",
    "should_stop": "import time\ns = time.time()\nfor x in y:\n    if job.should_stop(time.time() > s + 3): break",
    "flag": "import time\nif time.time() > 3: done = True\n\nif done: raise StopIteration",
    "timer": "import threading\n\n\nthreading.Timer(9, stop).start()",
    "alarm": "import signal\n\n\nsignal.alarm(60)",
    "callback": "import os\ndef on_step_end(self):\n    now = os.times()[4]\n    if now > 9: self.stop_reason = 'end'",
}
UNTIMED = {
    "printed": "import time\nt = time.time()\nfor b in x:\n    if loss < 0.1: break\nprint(time.time() - t)",
    "every minute": "import time\nfor b in x:\n    if time.time() - last > 60:\n        save()",
    "other time": "for b in x:\n    if sim.time() > 3: break",
}


@pytest.mark.parametrize("name", TIMED)
def test_an_end_by_the_clock_is_found_at_its_line(name: str) -> None:
    assert clock_exit(TIMED[name]) == 4


@pytest.mark.parametrize("name", UNTIMED)
def test_reading_a_clock_is_no_end(name: str) -> None:
    assert clock_exit(UNTIMED[name]) is None
