import os
import subprocess
import sys
import time

from pipelines.processes import Offspring

ORPHAN = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid)
"""


def test_a_process_whose_parent_is_gone_is_found_and_ended():
    offspring = Offspring()
    orphan = int(subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, check=True).stdout)
    assert orphan in offspring.alive()
    killed = offspring.end(grace_s=0.2)
    assert [line.split()[0] for line in killed] == [str(orphan)]
    assert not os.path.exists(f"/proc/{orphan}")


def test_processes_that_were_there_before_are_left_alone():
    earlier = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        offspring = Offspring()
        assert offspring.end(grace_s=0.0) == []
        assert earlier.poll() is None
    finally:
        earlier.kill()
        earlier.wait()


def test_a_process_that_ends_by_itself_in_time_is_not_killed():
    offspring = Offspring()
    begin = time.monotonic()
    brief = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(0.3)"])
    assert offspring.end(grace_s=30.0) == []
    assert time.monotonic() - begin < 30
    assert brief.wait() == 0
