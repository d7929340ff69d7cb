"""Machines made of Linux namespaces, joined by a bridge: as far as ssh and Ray can tell, hosts of their own."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

INIT = Path(__file__).with_name("host_init.sh")
NETWORK = "10.77.0"
GATEWAY = f"{NETWORK}.254"
_PATIENCE_S = 20.0


def cannot() -> str | None:
    """Why there can be no such machines here; None where there can."""
    if os.geteuid() != 0:
        return "namespaces take root"
    missing = [name for name in ("ip", "unshare", "rsync", "ssh", "ssh-keygen") if shutil.which(name) is None]
    if not Path("/usr/sbin/sshd").exists():
        missing.append("sshd")
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: openssh-server, openssh-client, rsync, iproute2)"
    tried = ["unshare", "--pid", "--fork", "--mount", "--uts", "--net", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if subprocess.run(tried, check=False, capture_output=True).returncode != 0:
        return "this system makes no namespaces"
    return None


@dataclass(frozen=True)
class Host:
    """One machine; its init is a child of `unshare`, and dies with it."""

    name: str
    address: str
    unshare: subprocess.Popen[bytes]

    @property
    def init(self) -> int:
        """Its process 1, by the number that it has out here."""
        found = Path(f"/proc/{self.unshare.pid}/task/{self.unshare.pid}/children").read_text().split()
        return int(found[0])

    def processes(self) -> dict[int, str]:
        """Command lines of all that runs on it, by the numbers out here."""
        mine = os.readlink(f"/proc/{self.init}/ns/pid")
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns/pid") == mine:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def leftovers(self) -> list[str]:
        """All but the ssh server and its connections."""
        return [line for line in self.processes().values() if line and "sshd" not in line.split()[0]]


@contextlib.contextmanager
def machines(folder: Path, names: Sequence[str]) -> Iterator[list[Host]]:
    """Start them, with addresses NETWORK.1 and so on and one key in folder/id; at the end nothing is left of them."""
    bridge = f"sps{os.getpid()}"
    _keys(folder)
    (folder / "shared").mkdir()
    with contextlib.ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("address", "add", f"{GATEWAY}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        hosts = [stack.enter_context(_host(folder, name, n, bridge)) for n, name in enumerate(names, start=1)]
        for host in hosts:
            _wait_for_ssh(host)
        yield hosts


@contextlib.contextmanager
def _host(folder: Path, name: str, number: int, bridge: str) -> Iterator[Host]:
    home = pwd.getpwuid(0).pw_dir
    state = folder / name
    _home(state, folder / "id.pub")
    address = f"{NETWORK}.{number}"
    kept = {sys.prefix, sys.base_prefix}
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--net", "bash", str(INIT), name]
    command += [f"{address}/24", GATEWAY, str(state), home, str(folder / "shared"), f"{home}/.cache/specserve", *kept]
    with (state / "log").open("wb") as log:
        unshare = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(home))
    try:
        host = Host(name, address, unshare)
        _plug(host, bridge, number)
        yield host
    finally:
        unshare.kill()
        unshare.wait()


def _environment(home: str) -> dict[str, str]:
    return {"HOME": home, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def _plug(host: Host, bridge: str, number: int) -> None:
    """A cable from the bridge to the machine's eth0."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        with contextlib.suppress(OSError, IndexError):
            init = host.init
            if os.readlink(f"/proc/{init}/ns/net") != os.readlink("/proc/self/ns/net"):
                break
        assert time.monotonic() < deadline_s, f"{host.name} did not start"
        time.sleep(0.05)
    here = f"{bridge}h{number}"
    _ip("link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", str(init))
    _ip("link", "set", here, "master", bridge)
    _ip("link", "set", here, "up")


def _wait_for_ssh(host: Host) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection((host.address, 22), timeout=1):
            return
        time.sleep(0.1)
    raise AssertionError(f"{host.name} has no ssh")


def _keys(folder: Path) -> None:
    for name in ("id", "host"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))


def _home(state: Path, public_key: Path) -> None:
    """The disk of a machine as somebody would hand it over: ssh key, and packages in a virtual environment."""
    home = state / "home"
    (home / ".ssh").mkdir(parents=True)
    shutil.copy(public_key, home / ".ssh" / "authorized_keys")
    (state / "sshd_config").write_text(
        f"Port 22\nHostKey /mnt/state/host\nPidFile none\nUsePAM no\nStrictModes no\nPermitRootLogin yes\n"
        f"PasswordAuthentication no\nAuthorizedKeysFile {pwd.getpwuid(0).pw_dir}/.ssh/authorized_keys\n"
    )
    shutil.copy(public_key.with_name("host"), state / "host")
    _packages(home)


def _packages(home: Path) -> None:
    """Machines have no network but each other: what the setup installs is there already, all but specserve itself."""
    venv = home / "specserve-venv"
    _run(sys.executable, "-m", "venv", "--without-pip", str(venv))
    here = sysconfig.get_path("purelib")
    site = venv / Path(here).relative_to(sys.prefix)
    (site / "packages.pth").write_text(f"{here}\n")
    _without(site, "specserve")
    for script in ("ray", "serve"):
        text = (Path(sys.prefix) / "bin" / script).read_text()
        at_home = Path(pwd.getpwuid(0).pw_dir) / "specserve-venv/bin/python"
        (venv / "bin" / script).write_text(f"#!{at_home}\n" + text.partition("\n")[2])
        (venv / "bin" / script).chmod(0o755)
    (home / ".config" / "pip").mkdir(parents=True)
    # For pip "no-build-isolation = false" means no isolation.
    (home / ".config" / "pip" / "pip.conf").write_text(
        "[global]\nno-index = true\n[install]\nno-build-isolation = false\n"
    )


def _without(site: Path, package: str) -> None:
    """Make sure that the package is not found among the shared ones before it is installed here."""
    (site / f"{package}.py").write_text(f"raise ImportError('{package} is not installed on this machine')\n")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
