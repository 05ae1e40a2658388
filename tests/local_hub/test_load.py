"""Many clients at once and a server that is killed again and again: what was acknowledged is there."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from huggingface_hub import HfApi

from focus_hf.local_hub import LocalHub
from tests.families import httpx

START = """
import sys
from focus_hf_command import main
sys.argv = ["focus-hf", "hub", "--root", sys.argv[1], "--port", sys.argv[2], "--token", "demo:t"]
main()
"""


class Server:
    """`focus-hf hub` in a process of its own, on one port, to be killed and started again."""

    def __init__(self, root):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.root, self.endpoint = root, f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        command = [sys.executable, "-c", START, str(self.root), str(self.port)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            if self.process.poll() is not None:  # a client's own end of a connection may have the port for a moment
                self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.02)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def commit(client, endpoint, path, content):
    """Whether a commit of one file was acknowledged."""
    file = {"path": path, "content": base64.b64encode(content).decode(), "encoding": "base64"}
    lines = [{"key": "header", "value": {"summary": path}}, {"key": "file", "value": file}]
    try:
        answer = client.post(
            f"{endpoint}/api/models/demo/x/commit/main", content="\n".join(map(json.dumps, lines)), timeout=30
        )
    except httpx.TransportError:  # killed in the middle: it may be there or not
        time.sleep(0.05)
        return False
    assert answer.status_code == 200, answer.text
    return True


@pytest.mark.parametrize(
    ("clients", "seconds", "kills"), [(6, 6, 3), pytest.param(32, 120, 50, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(900)
def test_nothing_that_was_acknowledged_is_lost(tmp_path, clients, seconds, kills):
    server = Server(tmp_path)
    HfApi(endpoint=server.endpoint, token="t").create_repo("demo/x")
    stop, acknowledged, troubles = threading.Event(), {}, []

    def work(number):
        client = httpx.Client(headers={"Authorization": "Bearer t"})
        try:
            for step in range(1_000_000):
                if stop.is_set():
                    return
                path, content = f"client-{number}/{step}.txt", os.urandom(20)
                if commit(client, server.endpoint, path, content):
                    acknowledged[path] = content
        except Exception as error:
            troubles.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for _ in range(kills):
        time.sleep(seconds / (kills + 1))
        server.kill()
        server.start()
    time.sleep(seconds / (kills + 1))
    stop.set()
    for thread in threads:
        thread.join(60)
    server.kill()
    assert not troubles and len(acknowledged) >= clients

    git = ["git", "--git-dir", str(tmp_path / "models" / "demo" / "x.git")]
    assert subprocess.run([*git, "fsck", "--strict"], capture_output=True).returncode == 0
    with LocalHub(tmp_path) as hub:
        listed = set(HfApi(endpoint=hub.endpoint, token=False).list_repo_files("demo/x"))
    assert set(acknowledged) <= listed
    names = "".join(f"main:{path}\n" for path in acknowledged)
    shown = subprocess.run([*git, "cat-file", "--batch"], input=names.encode(), capture_output=True, check=True).stdout
    assert all(content in shown for content in acknowledged.values())
    print(f"{len(acknowledged)} commits of {clients} clients in {seconds} s, {kills} kills")
