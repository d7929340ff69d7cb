"""Pipelines on a Ray of several nodes, as a program of its own that prints what it saw as JSON.

Each node is a raylet of this machine with CPUs for one pipeline; the head has room for the HTTP side only. The models
are emulated: an answer's text depends on its prompt alone, so a stream that is cut, mixed up or fed to a stranger's
state shows in its text. Ray reads RAY_AUTH_MODE and RAY_AUTH_TOKEN when it is imported: whoever starts this sets them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from specserve import config as configs
from specserve.bench.faults import titled
from specserve.cluster import launch, local_ray, processes
from specserve.config import Config
from specserve.models import _device_profile

PROFILE = "llama-8b-1b-h100"
SLOWNESS = 20
"""Times that the devices are slower than the profile says: sixteen streams then need little of this machine."""

TOKENS = 24
STREAMS = 16
WAIT_S = 400.0
PIPELINE_CPUS = 3
LATE_S = 60.0
_RESUMED = "specserve_requests_resumed_total"


@dataclass
class Streams:
    """Sixteen clients, each of which asks again as soon as its stream has ended."""

    url: str
    model: str
    stop: threading.Event = field(default_factory=threading.Event)
    texts: list[tuple[int, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __enter__(self) -> Streams:
        self.threads = [threading.Thread(target=self._client, args=(number,)) for number in range(STREAMS)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self.threads), "a stream hangs"

    def _client(self, number: int) -> None:
        while not self.stop.is_set():
            text, failure = streamed(self.url, self.model, number)
            if failure is None:
                self.texts.append((number, text))
            else:
                self.failures.append(failure)


def streamed(url: str, model: str, number: int) -> tuple[str, str | None]:
    """The text of one stream over a connection of its own, and how it failed, if it did."""
    body = {"model": model, "prompt": f"Question {number}", "max_tokens": TOKENS, "temperature": 0, "stream": True}
    text, done = "", False
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=WAIT_S) as reply:
            if reply.status_code != 200:
                return "", f"refused: {reply.read().decode()}"
            for line in reply.iter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return text, f"ended: {event['error']['code']}"
                    text += event["choices"][0]["text"]
    except httpx.HTTPError as error:
        return text, f"broken: {type(error).__name__}"
    return text, None if done else "broken: no end"


@contextmanager
def nodes() -> Iterator[Any]:
    """A cluster with a head for the HTTP side; ends it and all that it started."""
    from ray.cluster_utils import Cluster

    folder = local_ray._own_folder()
    base = local_ray._below(folder, "ray")  # where Ray notes the address, below TMPDIR
    before = processes.descendants()
    with local_ray._environment(local_ray._QUIET | {"TMPDIR": folder}):
        import ray

        shared = {"include_dashboard": False, "object_store_memory": 80 * 1024 * 1024}
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=2, temp_dir=base, **shared)
            ray.init(cluster.address, namespace="specserve", log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            processes.end(processes.descendants() - before, patience_s=5)
            shutil.rmtree(folder, ignore_errors=True)


def add_node(cluster: Any) -> None:
    """One more node with room for one pipeline. On a busy machine it comes late, or not at all at the first try."""
    before = living_nodes()
    while not living_nodes() - before:
        with contextlib.suppress(Exception):  # Ray's own patience is over
            cluster.add_node(num_cpus=PIPELINE_CPUS, object_store_memory=80 * 1024 * 1024)
        began = time.monotonic()
        while not living_nodes() - before and time.monotonic() < began + LATE_S:
            time.sleep(0.3)


def kill_node(node_id: str) -> None:
    """SIGKILL its raylet and all that this started, as if its machine had lost its power."""
    import ray

    (name,) = (node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == node_id)
    (raylet,) = titled(f"--raylet_socket_name={name}")
    for pid in [raylet, *(child.pid for child in processes.descendants(raylet))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def living_nodes() -> set[str]:
    """Nodes that Ray holds to be alive."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def until(condition: Callable[[], object], what: str) -> float:
    """Seconds until the condition holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < WAIT_S, f"did not happen in {WAIT_S:g} s: {what}"
        time.sleep(0.3)
    return time.monotonic() - began


def deploy(config: Config) -> None:
    """Bring the application to this configuration without waiting."""
    from ray import serve

    from specserve.cluster.deploy import APP_NAME, application

    target = serve.RunTarget(application(config), name=APP_NAME, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)


def serving(url: str) -> set[str]:
    """Names of the pipelines that the ingress gives requests to."""
    try:
        listed = httpx.get(f"{url}/status.json", timeout=30).json().get("pipelines", [])
    except (httpx.HTTPError, ValueError):
        return set()
    return {one["name"] for one in listed if one["status"] == "ok"}


def actors() -> list[tuple[str, str]]:
    """(class, node) of each living actor. The public way to ask needs the dashboard, which does not run here."""
    from ray._private import state

    found = state.actors(actor_state_name="ALIVE").values()
    return [(actor["ActorClassName"], actor["Address"]["NodeID"]) for actor in found]


def run(config: Config, steps: list[str]) -> dict[str, Any]:
    """These steps, in order."""
    facts: dict[str, Any] = {}
    with nodes() as cluster:
        _one_proxy(config)
        _say("starting")
        deploy(config)
        # The head takes the ingresses before there is another node, so that no node's loss is theirs.
        until(
            lambda: sum("Ingress" in kind for kind, _ in actors()) == config.cluster.ingress_replicas, "the ingresses"
        )
        for _ in range(2):
            add_node(cluster)
        with _waited_for(config):
            url = f"http://127.0.0.1:{config.server.port}"
            until(lambda: len(serving(url)) == 2, "two pipelines")
            expected = [streamed(url, config.served_name, number)[0] for number in range(STREAMS)]
            facts["expected"] = expected
            for step in steps:
                _say(step)
                facts[step] = STEPS[step](cluster, config, url, expected)
                _say(json.dumps(facts[step]))
    return facts


@contextmanager
def _waited_for(config: Config) -> Iterator[None]:
    """The application serves; at the end it is gone, and Serve with it."""
    from ray import serve

    try:
        assert launch._wait(config, threading.Event(), launch._Display(quiet=True))
        yield
    finally:
        serve.shutdown()


def _say(text: str) -> None:
    """For whoever waits, and for the report of a failure."""
    print(f"{time.monotonic():.0f} s {text}", file=sys.stderr, flush=True)


def _one_proxy(config: Config) -> None:
    """The nodes share this machine's address, so that only one of them can listen on the port."""
    from ray import serve

    http = {"host": config.server.host, "port": config.server.port}
    serve.start(proxy_location="HeadOnly", http_options=http, logging_config={"enable_access_log": False})


def seen(streams: Streams, expected: list[str]) -> dict[str, Any]:
    """How the streams of one step ended."""
    wrong = sum(text != expected[number] for number, text in streams.texts)
    return {"finished": len(streams.texts), "wrong": wrong, "failures": streams.failures}


def update(cluster: Any, config: Config, url: str, expected: list[str]) -> dict[str, Any]:
    """A setting of the engine changes: each pipeline is replaced while sixteen streams are open."""
    del cluster
    before = serving(url)
    engine = config.engine.model_copy(update={"draft_wait_s": 1.5})
    with Streams(url, config.served_name) as streams:
        until(lambda: len(streams.texts) >= STREAMS, "streams before the update")
        deploy(config.model_copy(update={"engine": engine}))
        until(lambda: len(now := serving(url)) == 2 and not now & before, "both replaced")
        done = len(streams.texts)
        until(lambda: len(streams.texts) >= done + STREAMS, "streams after the update")
    return seen(streams, expected) | {"replaced": len(before - serving(url))}


def scale_up(cluster: Any, config: Config, url: str, expected: list[str]) -> dict[str, Any]:
    """A third pipeline is asked for, and has no room before a node is added. The others are left alone."""
    before = serving(url)
    wider = config.cluster.model_copy(update={"pipelines": 3})
    engine = config.engine.model_copy(update={"draft_wait_s": 1.5})
    with Streams(url, config.served_name) as streams:
        deploy(config.model_copy(update={"cluster": wider, "engine": engine}))
        time.sleep(3)
        without_room = len(serving(url))
        add_node(cluster)
        until(lambda: len(serving(url)) == 3, "the third pipeline")
    kept = before <= serving(url)
    return seen(streams, expected) | {
        "without_room": without_room,
        "kept": kept,
        "nodes": len(living_nodes()),
    }


def lose_node(cluster: Any, config: Config, url: str, expected: list[str]) -> dict[str, Any]:
    """The node of one pipeline is killed under sixteen streams."""
    del cluster
    victim = min(nodes_of("CoordinatorActor") - nodes_of(*_HTTP))
    with Streams(url, config.served_name) as streams:
        until(lambda: len(streams.texts) >= STREAMS, "streams before the loss")
        done = len(streams.texts)
        kill_node(victim)
        until(lambda: len(streams.texts) >= done + 4 * STREAMS, "streams after the loss")
    return seen(streams, expected) | {"serving": len(serving(url)), "resumed": resumed(url)}


def replace_node(cluster: Any, config: Config, url: str, expected: list[str]) -> dict[str, Any]:
    """A node takes the place of the lost one, and its pipeline comes back under sixteen streams."""
    with Streams(url, config.served_name) as streams:
        add_node(cluster)
        until(lambda: len(serving(url)) == 2, "the pipeline in its new place")
        done = len(streams.texts)
        until(lambda: len(streams.texts) >= done + STREAMS, "streams of both")
    return seen(streams, expected)


def resumed(url: str) -> float:
    """Streams that went on in another coordinator, as the metrics count them."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(_RESUMED))


_HTTP = ("Ingress", "ProxyActor", "ServeController")


def nodes_of(*words: str) -> set[str]:
    """The nodes that hold an actor with one of these words in its class."""
    return {node for kind, node in actors() if any(word in kind for word in words)}


STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    step.__name__: step for step in (update, scale_up, lose_node, replace_node)
}


def slow_profile(folder: str) -> str:
    """The path of the profile with all its times made longer."""
    profile = json.loads((_device_profile.FOLDER / f"{PROFILE}.json").read_text())
    for role in ("target", "draft"):
        for curve in ("decode", "extend"):
            for point in profile[role][curve]:
                point["ms"] *= SLOWNESS
    path = Path(folder, "slow.json")
    path.write_text(json.dumps(profile))
    return str(path)


def settings(profile: str) -> Config:
    """Two pipelines, each whole on one node, and two ingresses."""
    asked = _device_profile.settings(profile) | {
        "server.port": 0,
        "target.context_length": 2048,
        "draft.model.context_length": 2048,
        "target.kv_blocks": 2048,
        "draft.model.kv_blocks": 2048,
        "cluster.lost_after_s": 15,  # beats of so many processes on one machine come late
        "cluster.pipelines": 2,
        "cluster.wait_for_nodes_s": WAIT_S,
        "cluster.placement": "STRICT_PACK",
        "cluster.ingress_replicas": 2,
        "cluster.routing": "least_loaded",
    }
    return launch.with_port(configs.parse(configs.override({}, asked)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(run(settings(slow_profile(place)), sys.argv[1:] or list(STEPS))))
    sys.stdout.flush()
    os._exit(0)  # threads of Ray's driver may outlive its shutdown
