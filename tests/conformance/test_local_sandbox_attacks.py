"""What a local sandbox does not let a command do. Each test is the attack itself, with what it must not have reached.

Where an attack could fail for a reason of its own (a tool that is missing, a typo), the test first shows that the
same thing works where it is allowed.
"""

import asyncio
import io
import os
import resource
import socket
import subprocess
import tarfile
import threading
import time
from pathlib import Path

import pytest
import pytest_asyncio
from local_boxes import host_processes, wait_until_gone, write_task

from sandbox_env.archive import ArchiveBuilder
from sandbox_env.providers import local_cgroup, local_wire
from sandbox_env.providers.local import LocalProvider
from sandbox_env.providers.local_sandbox import LocalSandbox
from sandbox_env.sandbox import SandboxError

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = f"secret-{os.getpid()}-of-the-host"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider():
    os.environ["HOST_SECRET"] = SECRET
    provider = LocalProvider(max_processes=64, memory_mb=256, storage_mb=64, max_file_mb=32, output_limit_kb=64)
    await provider.start("attacks")
    yield provider
    await provider.stop()
    del os.environ["HOST_SECRET"]


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(provider, task):
    sandbox = await provider.create(task)
    yield sandbox
    # Whatever was done to it: it still works, and it ends.
    assert await output(sandbox, "echo alive", cwd="/") == "alive\n"
    await sandbox.close()


@pytest_asyncio.fixture(loop_scope="module", params=["cgroups", "no cgroups"])
async def bounded(request, task, monkeypatch):
    """A sandbox with each way of bounding memory and processes."""
    if request.param == "no cgroups":
        monkeypatch.setattr(local_cgroup, "_find_parents", lambda: [])
    provider = LocalProvider(max_processes=64, memory_mb=256, storage_mb=64, max_file_mb=32)
    await provider.start("bounded")
    sandbox = await provider.create(task)
    yield sandbox
    assert await output(sandbox, "echo alive") == "alive\n"
    await provider.stop()


async def output(sandbox, command, timeout_s=30, **options):
    return (await sandbox.exec(command, timeout_s=timeout_s, **options)).output


async def python(sandbox, program, timeout_s=30):
    return await sandbox.run(["/usr/bin/python3", "-c", program], timeout_s=timeout_s)


def archive_of(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return buffer.getvalue()


def member(name, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
    return info


def one_file(name, content=b"x"):
    builder = ArchiveBuilder()
    builder.add_file(name, content)
    return builder.build()


# The file system


@pytest.mark.parametrize(
    "path", ["/usr", "/usr/bin", "/bin", "/etc", "/lib", "/dev", "/proc", "/proc/sys/kernel", "/etc/alternatives"]
)
async def test_the_system_cannot_be_written(sandbox, path):
    assert await output(sandbox, f"echo x > {path}/intruder && echo written") != "written\n"
    assert not os.path.exists(f"{path}/intruder")


async def test_system_files_cannot_be_replaced_remounted_or_uncovered(sandbox):
    attacks = [
        "echo x >> /etc/passwd",
        "mv /etc/passwd /etc/moved",
        "mount -o remount,rw /usr",
        "mount -o remount,rw,bind /etc",
        "umount /etc",
        "umount -l /usr",
        "mount --bind /tmp /usr",
        "mount -t tmpfs none /mnt",
        "mount -t proc none /mnt",
        "mount -t overlay -o lowerdir=/usr,upperdir=/tmp,workdir=/tmp none /usr",
        "chroot /tmp /bin/true",
        "mknod /tmp/disk b 8 0",
        "echo core > /proc/sys/kernel/core_pattern",
        "echo 1000 > /proc/sys/user/max_user_namespaces",
        "echo b > /proc/sysrq-trigger",
    ]
    for attack in attacks:
        assert "worked" not in await output(sandbox, f"{attack} && echo worked"), attack
    assert await output(sandbox, "tail -1 /etc/passwd; ls /mnt /usr/bin/env") != ""


async def test_the_host_s_files_are_not_there(sandbox, tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    for path in (str(tmp_path / "secret"), str(Path.cwd()), str(Path.home() / ".ssh"), "/etc/shadow", "/sys/kernel"):
        assert await output(sandbox, f"ls {path} > /dev/null 2>&1 && echo there") == "", path
    for path in ("/home", "/root", "/tmp", "/run", "/var", "/opt", "/srv", "/mnt"):
        assert await output(sandbox, f"find {path} -type f -o -type s") == "", path
    # Through another process's view of the file system, and through what is below a mount.
    assert SECRET not in await output(sandbox, f"cat /proc/*/root/{tmp_path}/secret /proc/1/cwd/{tmp_path}/secret 2>&1")


async def test_the_host_s_environment_is_not_there(sandbox):
    assert os.environ["HOST_SECRET"] == SECRET
    assert "GREETING" in await output(sandbox, "env; cat /proc/self/environ")
    everything = await output(sandbox, "env; cat /proc/*/environ /proc/*/cmdline /proc/keys 2>&1; set", timeout_s=30)
    assert SECRET not in everything
    assert "HOST_SECRET" not in everything


async def test_a_full_disk_is_only_the_sandbox_s_and_can_still_be_scored(sandbox, task):
    free = os.statvfs("/tmp").f_bavail
    fill = "for i in $(seq 20); do head -c 30M /dev/zero > {0}/fill$i || break; done; df --output=pcent {0} | tail -1"
    assert "100%" in await output(sandbox, fill.format("/app"))
    assert "No space" in await output(
        sandbox, "echo xxxxxxxxxx > /tmp/more; echo x > /dev/shm/more; cp /etc/services /var"
    )
    await sandbox.upload(one_file("test.sh", b"echo 0 > /logs/reward.txt"), "/tests")
    await sandbox.exec("bash /tests/test.sh", timeout_s=10)
    assert await sandbox.download("/logs/reward.txt", max_bytes=10) == b"0\n"
    assert free - os.statvfs("/tmp").f_bavail < (200 << 20) / os.statvfs("/tmp").f_frsize


async def test_countless_empty_files_are_bounded(sandbox):
    result = await python(
        sandbox,
        "import os, itertools\n"
        "os.makedirs('/app/many')\n"
        "try:\n"
        "    for n in itertools.count(): os.close(os.open(f'/app/many/{n}', os.O_CREAT | os.O_WRONLY))\n"
        "except OSError as error: print(n, error.strerror)",
    )
    count, reason = result.output.split(maxsplit=1)
    assert int(count) < 256 * 64
    assert "No space" in reason


async def test_a_giant_file_is_cut_at_its_limit(sandbox):
    assert (await sandbox.exec("head -c 40M /dev/zero > big", timeout_s=20)).exit_code != 0
    assert (await sandbox.exec("truncate -s 1T sparse", timeout_s=20)).exit_code != 0
    assert int(await output(sandbox, "stat -c %s big")) <= 32 << 20


# Uploads and downloads


@pytest.mark.parametrize(
    "bad",
    [
        member("/etc/intruder"),
        member("../../etc/intruder"),
        member("a/../../b"),
        member("link", tarfile.SYMTYPE, "/etc"),
        member("hard", tarfile.LNKTYPE, "/etc/passwd"),
        member("device", tarfile.CHRTYPE),
        member("pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda info: info.name,
)
async def test_an_archive_with_links_or_paths_that_lead_out_is_refused_whole(sandbox, bad):
    with pytest.raises(SandboxError, match="archive member"):
        await sandbox.upload(archive_of(member("good"), bad), "/app/in")
    assert await output(sandbox, "ls /app/in 2>/dev/null") == ""


@pytest.mark.parametrize("target", ["relative", "/app/../etc", "/usr/share", "/etc", "/proc/self", "/dev/shm"])
async def test_an_upload_goes_nowhere_but_to_an_absolute_folder_that_is_not_the_system_s(sandbox, target):
    with pytest.raises(SandboxError):
        await sandbox.upload(one_file("intruder"), target)


async def test_what_is_no_archive_is_refused(sandbox):
    for junk in (b"junk" * 1000, b"\xff" * 512, one_file("a")[:700]):
        with pytest.raises(SandboxError):
            await sandbox.upload(junk, "/app/in")


async def test_links_left_in_the_way_of_an_upload_are_replaced_not_followed(sandbox):
    traps = "mkdir -p /app/victim /tests && echo keep > /app/victim/file && ln -s /app/victim /tests/sub"
    await sandbox.exec(
        f"{traps} && ln -s /app/victim/file /tests/test.sh && ln /app/victim/file /app/hard", timeout_s=10
    )
    await sandbox.upload(one_file("test.sh", b"echo ours"), "/tests")
    await sandbox.upload(one_file("sub/deep", b"ours"), "/tests")
    await sandbox.upload(one_file("hard", b"ours"), "/app")
    assert await output(sandbox, "cat /app/victim/file; ls /app/victim; bash /tests/test.sh; cat /tests/sub/deep") == (
        "keep\nfile\nours\nours"
    )


async def test_folders_pipes_and_locks_left_in_the_way_of_an_upload_do_not_stop_it(sandbox):
    traps = "mkdir -p /tests/test.sh/x /tests/locked && chmod 0 /tests/test.sh /tests/locked; mkfifo /tests/pipe"
    await sandbox.exec(f"{traps}; rm -rf /solution/*; touch /solution/sub; chmod 0 /tests", timeout_s=10)
    for name in ("test.sh", "locked/file", "pipe"):
        await sandbox.upload(one_file(name, b"ours"), "/tests")
        assert await sandbox.download(f"/tests/{name}", max_bytes=10) == b"ours"
    await sandbox.upload(one_file("file", b"ours"), "/solution/sub")
    assert await sandbox.download("/solution/sub/file", max_bytes=10) == b"ours"


async def test_the_folders_of_scoring_cannot_be_taken_away(sandbox):
    assert "moved" not in await output(sandbox, "mv /tests /app/t && echo moved; rm -rf /tests; ln -s /app /logs")
    await sandbox.upload(one_file("test.sh", b"ours"), "/tests")
    assert await sandbox.download("/tests/test.sh", max_bytes=10) == b"ours"


async def test_a_download_follows_no_link_and_reads_nothing_but_regular_files(sandbox):
    traps = (
        "echo x > real; ln -s /etc/passwd link; ln -s real near; ln -s / root; mkfifo pipe; mkdir folder; touch locked"
    )
    await sandbox.exec(f"{traps}; chmod 0 locked; ln -s self self", timeout_s=10)
    assert await sandbox.download("/app/real", max_bytes=10) == b"x\n"
    names = (
        "link",
        "near",
        "root/etc/passwd",
        "root/app/real",
        "pipe",
        "folder",
        "locked",
        "self",
        "real/x",
        "n" * 999,
    )
    for name in names:
        assert await sandbox.download(f"/app/{name}", max_bytes=1000) is None, name
    for path in ("/etc/passwd", "/proc/1/environ", "/proc/1/maps", "/proc/self/mem", "/dev/zero", "/usr/bin/env", "/"):
        assert await sandbox.download(path, max_bytes=1000) is None, path
    for path in ("app/real", "/app/../app/real"):
        with pytest.raises(SandboxError, match="absolute path"):
            await sandbox.download(path, max_bytes=10)


async def test_a_sparse_giant_is_not_downloaded(sandbox):
    await sandbox.exec("truncate -s 31M big", timeout_s=10)
    with pytest.raises(SandboxError, match="larger than 1000 bytes"):
        await sandbox.download("/app/big", max_bytes=1000)


# The network


async def test_no_listener_of_the_host_can_be_reached(sandbox, tmp_path):
    accepted = []

    def serve(listener):
        while True:
            try:
                accepted.append(listener.accept())
            except OSError:
                return

    tcp = socket.create_server(("0.0.0.0", 0))
    port = tcp.getsockname()[1]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{SECRET}")
    abstract.listen()
    named = socket.socket(socket.AF_UNIX)
    named.bind(str(tmp_path / "socket"))
    named.listen()
    for listener in (tcp, abstract, named):
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
    addresses = ["127.0.0.1", "::1", socket.gethostbyname(socket.gethostname()), "8.8.8.8", "169.254.169.254"]
    program = f"""
import socket
for address in {addresses!r}:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for kind, port in ((socket.SOCK_STREAM, {port}), (socket.SOCK_DGRAM, 53)):
        with socket.socket(family, kind) as s:
            s.settimeout(2)
            try:
                s.connect((address, port)); s.send(b"x")
                own = kind == socket.SOCK_DGRAM and address in ("127.0.0.1", "::1")
                print("own" if own else "reached", address)
            except OSError: pass
for path in ({chr(0) + SECRET!r}, {str(tmp_path / "socket")!r}, "/var/run/docker.sock", "/run/dbus/system_bus_socket"):
    with socket.socket(socket.AF_UNIX) as s:
        try: s.connect(path); print("reached", path)
        except OSError: pass
try: socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print("reached raw packets")
except OSError: pass
try: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print("reached raw sockets")
except OSError: pass
with socket.create_server(("127.0.0.1", 0)) as own:
    socket.create_connection(own.getsockname()).close()
    print("own works")
"""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
        result = await python(sandbox, program)
        assert result.output.splitlines()[-1] == "own works", result.output
        assert "reached" not in result.output
        await asyncio.sleep(0.05)
        assert len(accepted) == 1  # our own
    finally:
        for listener in (tcp, abstract, named):
            listener.close()
    assert "lo" in await output(sandbox, "cat /proc/net/dev")
    assert await output(sandbox, "grep -cvE 'lo:|Inter|face' /proc/net/dev") == "0\n"


# Other processes


async def test_no_process_of_the_host_can_be_seen_or_killed(sandbox):
    marker = f"{SECRET}-victim"
    victim = subprocess.Popen(["bash", "-c", f"exec -a {marker} sleep 300"])
    try:
        while not host_processes(marker):
            await asyncio.sleep(0.01)
        listing = await output(sandbox, "ps -ef; cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
        assert "/init" in listing
        assert marker not in listing
        await sandbox.exec(f"kill -9 {victim.pid} {os.getpid()} {os.getppid()}; kill -9 -1; killall5 -9", timeout_s=10)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


async def test_the_first_process_cannot_be_signalled_traced_or_read(sandbox):
    for number in range(1, 65):
        await sandbox.exec(f"kill -{number} 1", timeout_s=10)
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
child = os.fork()
if child == 0: libc.pause()
print("attach to own child", libc.ptrace(16, child, 0, 0))
os.kill(child, 9)
print("attach to 1", libc.ptrace(16, 1, 0, 0), libc.ptrace(0x4206, 1, 0, 0))
class Part(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
ours, theirs = Part(ctypes.addressof(buffer), 8), Part(0x400000, 8)
print("read memory", libc.process_vm_readv(1, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0))
pidfd = os.pidfd_open(1)
print("take descriptors", [libc.syscall(438, pidfd, n, 0) for n in range(3, 12)].count(-1))
for name in ("environ", "maps", "mem", "fd", "root", "cwd", "exe", "syscall", "stack", "fdinfo", "auxv", "map_files"):
    try:
        path = f"/proc/1/{name}"
        if name in ("root", "cwd", "exe"): print("READ", name, os.readlink(path))
        elif os.path.isdir(path): print("READ", name, os.listdir(path))
        else: print("READ", name, open(path).read(1))
    except OSError: pass
for name in ("mem", "oom_score_adj", "comm", "clear_refs", "coredump_filter", "autogroup", "timerslack_ns"):
    try:
        with open(f"/proc/1/{name}", "w") as file: file.write("1000")
        print("WROTE", name)
    except OSError: pass
"""
    result = await python(sandbox, program)
    assert result.output == ("attach to own child 0\nattach to 1 -1 -1\nread memory -1\ntake descriptors 9\n")


async def test_a_command_inherits_no_descriptor_but_its_own_three(sandbox):
    program = """
import os
for fd in range(3, 4096):
    try: os.write(fd, b"x"); print("wrote", fd)
    except OSError as error: assert error.errno == 9, (fd, error)
print(sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in (0, 1, 2)))
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            if "socket" in os.readlink(f"/proc/{pid}/fd/{fd}"): print("socket", pid, fd)
    except OSError: pass
print(open("/proc/net/unix").read().count("\\n"))
"""
    result = await python(sandbox, program)
    assert result.output == "['/dev/null', 'pipe', 'pipe']\n1\n"


async def test_an_answer_written_by_a_command_is_only_output(sandbox):
    fake = local_wire.encode({"exit_code": 0, "timed_out": False, "truncated": False, "duration_s": 0.0}, b"fake")
    await sandbox.upload(one_file("fake", fake), "/app")
    result = await sandbox.exec("cat /app/fake; cat /app/fake >&2; exit 7", timeout_s=10)
    assert result.exit_code == 7
    assert result.output.count("fake") == 2


async def test_a_fork_bomb_is_bounded_and_ends(bounded):
    marker = f"bomb-{os.getpid()}"
    bomb = f"#!/bin/bash\nwhile :; do exec -a {marker} bash /app/bomb & done 2> /dev/null\n"
    await bounded.upload(one_file("bomb", bomb.encode()), "/app")
    running = asyncio.create_task(bounded.exec("bash /app/bomb; :(){ :|:& };:; sleep 60", timeout_s=2))
    most = 0
    while not running.done():
        most = max(most, len(host_processes("/app/bomb")))
        await asyncio.sleep(0.1)
    assert 2 < most <= 66
    assert (await running).timed_out
    assert await output(bounded, "ps -e | wc -l") == "5\n"  # the header, the first process, bash, ps, wc


async def test_a_box_full_of_daemons_still_runs_the_next_command(bounded):
    await bounded.exec("for i in $(seq 100); do setsid -f sleep 300 || break; done 2> /dev/null", timeout_s=20)
    assert await output(bounded, "echo still") in (
        "still\n",
        "/bin/bash: fork: retry: Resource temporarily unavailable\n",
    )
    assert await output(bounded, "echo still") == "still\n"


async def test_many_orphans_do_not_use_up_the_processes(sandbox):
    assert (await output(sandbox, "for i in $(seq 300); do (true &); done; echo through")).endswith("through\n")
    assert await output(sandbox, "ps -eo stat | grep -c Z") == "0\n"


@pytest.mark.parametrize(
    "attack", ["unshare -U true", "unshare -Ur id", "unshare -m true", "unshare -n true", "unshare -p -f true"]
)
async def test_no_namespace_can_be_made(sandbox, attack):
    assert "worked" not in await output(sandbox, f"{attack} && echo worked")


async def test_no_namespace_can_be_made_by_a_system_call_either(sandbox):
    result = await python(
        sandbox,
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None)\n"
        "print([libc.unshare(f) for f in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x10020000)])\n"
        "print([libc.setns(os.open(f'/proc/self/ns/{n}', 0), 0) for n in ('mnt', 'net', 'pid')])\n"
        "try: print(os.open('/proc/1/ns/mnt', 0))\n"
        "except OSError as e: print('denied')",
    )
    assert result.output == "[-1, -1, -1, -1, -1]\n[-1, -1, -1]\ndenied\n"


async def test_system_calls_with_a_way_around_namespaces_are_refused(sandbox):
    program = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"
calls = {"keyctl": 250 if x86 else 219, "add_key": 248 if x86 else 217, "bpf": 321 if x86 else 280,
         "perf": 298 if x86 else 241, "userfaultfd": 323 if x86 else 282, "io_uring": 425}
print([libc.syscall(n, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM for n in calls.values()])
if x86: print(libc.syscall(0x40000000 + 39) == -1, libc.syscall(39) == os.getpid())
"""
    assert "False" not in (await python(sandbox, program)).output
    assert (await python(sandbox, program)).exit_code == 0


async def test_no_privilege_is_there_and_none_comes_from_setuid_or_capabilities(sandbox):
    status = await output(
        sandbox,
        "cp /usr/bin/grep /app/g; chmod u+s,g+s /app/g; setcap all+ep /app/g; chown nobody /app/g;"
        "/app/g -E 'Cap|NoNewPrivs' /proc/self/status",
    )
    values = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    assert values.pop("NoNewPrivs") == "1"
    assert len(values) == 5
    assert set(values.values()) == {"0" * 16}
    for attack in ("su -c true nobody", "chown nobody /app/notes.txt", "hostname other", "date -s 2001-01-01"):
        assert "worked" not in await output(sandbox, f"{attack} < /dev/null && echo worked"), attack
    result = await python(sandbox, "import os\nos.setuid(65534)")
    assert "Invalid argument" in result.output or "not permitted" in result.output


async def test_on_the_host_a_command_of_root_is_not_root(sandbox):
    marker = f"uid-{os.getpid()}"
    await sandbox.exec(f"(exec -a {marker} sleep 300) > /dev/null &", timeout_s=10)
    while not (found := host_processes(marker)):
        await asyncio.sleep(0.01)
    status = Path(f"/proc/{found[0]}/status").read_text()
    uids = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
    assert set(uids) == {str(65534 if os.geteuid() == 0 else os.geteuid())}


# Limits


@pytest.mark.parametrize("command", ["yes", "cat /dev/zero", "yes >&2", "while :; do echo line; done"])
async def test_a_flood_of_output_takes_no_memory_and_ends(sandbox, command):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await sandbox.exec(f"echo first; {command}", timeout_s=3)
    assert result.exit_code in (124, 137)
    assert result.truncated
    assert result.output.startswith("first\n")
    assert "bytes dropped" in result.output
    assert len(result.output) < 70_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


async def test_a_daemon_that_floods_the_pipe_of_its_ended_command_is_cut_off(sandbox):
    await sandbox.exec("yes & true", timeout_s=10)
    for _ in range(200):
        if await output(sandbox, "pgrep -c yes") == "0\n":
            return
        await asyncio.sleep(0.05)
    pytest.fail("it still runs")


async def test_one_process_that_takes_all_memory_is_ended(bounded):
    result = await python(bounded, "kept = [bytearray(16 << 20) for _ in range(1000)]")
    assert result.exit_code != 0
    assert not result.timed_out


async def test_many_processes_that_take_all_memory_together_are_ended(bounded):
    program = """
import os, sys, time
open(f"/app/started-{sys.argv[1]}", "w")
kept = bytes(range(256)) * (50 << 12)
while not os.path.exists("/app/go"): time.sleep(0.05)
print("kept")
"""
    await bounded.upload(one_file("hog.py", program.encode()), "/app")
    start = "for i in $(seq 20); do python3 hog.py $i & done 2> /dev/null"
    wait = "until [ $(ls started-* | wc -l) = 20 ]; do sleep 0.1; done; sleep 1; touch go; wait"
    kept = await output(bounded, f"{start}; {wait}")
    assert kept.count("kept") < 12  # 5 fit; watching finds out a moment later


async def test_files_in_memory_count(bounded):
    await bounded.exec("for i in $(seq 20); do head -c 30M /dev/zero > /dev/shm/$i; done", timeout_s=20)
    assert int(await output(bounded, "du -sm /dev/shm | cut -f1")) <= 64


async def test_memory_that_belongs_to_no_process_is_counted_or_refused(bounded):
    result = await python(
        bounded,
        "import os\n"
        "try:\n"
        "    for n in range(100):\n"
        "        fd = os.memfd_create('x'); os.ftruncate(fd, 30 << 20); os.write(fd, bytes(30 << 20))\n"
        "    print('kept', n)\n"
        "except PermissionError: print('refused')",
    )
    assert result.exit_code == 137 or result.output == "refused\n"


async def test_a_process_that_burns_cpu_is_ended_though_it_ignores_the_warning(task):
    provider = LocalProvider(cpu_time_s=1)
    await provider.start("burner")
    sandbox = await provider.create(task)
    try:
        started = time.monotonic()
        result = await sandbox.exec("trap '' XCPU; while :; do :; done", timeout_s=60)
        assert result.exit_code == 137
        assert not result.timed_out
        assert time.monotonic() - started < 50
        # The hard limit follows the soft one a moment after the start.
        raised = await sandbox.exec("sleep 0.5; ulimit -t unlimited && ulimit -Ht", timeout_s=30)
        assert "not permitted" in raised.output
    finally:
        await provider.stop()


async def test_limits_cannot_be_raised(sandbox):
    for option, value in (("-u", 65), ("-f", 32 << 10), ("-c", 0), ("-n", 4096)):
        assert await output(sandbox, f"ulimit -H{option[1]}") == f"{value}\n"
        assert "worked" not in await output(sandbox, f"ulimit {option} unlimited && echo worked")


async def test_nothing_is_left_of_a_daemon_that_hides(provider, task):
    marker = f"hidden-{os.getpid()}"
    sandbox = await provider.create(task)
    deaf = "trap '' HUP INT TERM"
    hide = f'{deaf}; (setsid bash -c "{deaf}; (exec -a {marker} sleep 300) & disown; exit" &)'
    await sandbox.exec(hide, timeout_s=10)
    while not host_processes(marker):
        await asyncio.sleep(0.01)
    await sandbox.close()
    await wait_until_gone(marker, timeout_s=0)


# A first process that was taken over would still be only a stranger on a socket.


class SilentLauncher:
    """Counts what it is asked to end. The process that it would end is the test itself."""

    def __init__(self):
        self.killed = []

    def kill(self, box_id):
        self.killed.append(box_id)

    async def end(self, box_id):
        return ""


HEADER = {"exit_code": 0, "timed_out": False, "truncated": False, "duration_s": 0.1}


def frame(header: bytes, payload_bytes: int = 0) -> bytes:
    return local_wire.PREFIX.pack(len(header), payload_bytes) + header


@pytest.mark.parametrize(
    "answer",
    [
        frame(b"not json"),
        frame(b"[1, 2]"),
        frame(b"[" * 100_000),
        frame(b"{}"),
        frame(b'{"exit_code": "x", "timed_out": false, "truncated": false, "duration_s": 1}'),
        frame(b'{"exit_code": 1, "timed_out": false, "truncated": false, "duration_s": null}'),
        local_wire.PREFIX.pack(0xFFFFFFFF, 0),
        local_wire.PREFIX.pack(2, 0xFFFFFFFF),
        local_wire.encode(HEADER, b"x" * 10_000),
        b"",
        b"\0",
    ],
    ids=[
        "no json",
        "a list",
        "deep",
        "empty",
        "text code",
        "no time",
        "giant header",
        "giant body",
        "long",
        "end",
        "cut",
    ],
)
async def test_a_hostile_answer_ends_the_sandbox_and_is_an_error(answer):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    launcher = SilentLauncher()
    sandbox = LocalSandbox("hostile", launcher, ours, workdir="/", env={}, output_bytes=4096, on_close=lambda: None)
    theirs.sendall(answer)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(SandboxError, match="hostile"):
        await sandbox.exec("true", timeout_s=5)
    with pytest.raises(SandboxError, match="hostile"):
        await sandbox.exec("true", timeout_s=5)
    assert launcher.killed == ["hostile"]
    await sandbox.close()
    theirs.close()


async def test_a_first_process_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr("sandbox_env.providers.local_sandbox.GRACE_S", 0.1)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    launcher = SilentLauncher()
    sandbox = LocalSandbox("mute", launcher, ours, workdir="/", env={}, output_bytes=4096, on_close=lambda: None)
    with pytest.raises(SandboxError, match=r"mute: no answer within 0.2 s"):
        await sandbox.exec("true", timeout_s=0.1)
    assert launcher.killed == ["mute"]
    await sandbox.close()
    theirs.close()
