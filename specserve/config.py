"""The whole configuration as one frozen tree. A misspelt key is an error, never a silent default.

YAML files use the same names as this tree; units are in the names. What is *derived* from a machine or a model
(block counts, vocabulary size) is reported by the workers at start and never written back here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from specserve.errors import ConfigError
from specserve.tree_shape import TreeShape, static

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


DEMO, DEMO_HEAD = "demo", "demo-head"
"""Sources of models that ship with the package: the demo's target or draft model, and the head for its target."""


class Section(BaseModel):
    """A part of the tree: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic takes true for 1."""
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and field.annotation in (int, float, int | None, float | None):
            raise ValueError(f"expected a number (found {str(value).lower()})")
        return value


class EmulatedConfig(Section):
    """What a model of `source: emulated` says and whose time it takes; see `models/emulated.py`.

    Acceptance and runners-up are those of a draft; a target ignores them.
    """

    profile: str = Field("qwen3-32b-0.6b-h100", description="a shipped device profile, or the path of a .json file")
    seed: int = Field(0, description="of the language; the same for target and draft")
    acceptance: float = Field(0.78, ge=0, le=1, description="how often the draft's first choice is the target's token")
    runner_up_hit: float = Field(
        0.9, ge=0, le=1, description="where it is not, how often the target's token is among the draft's runners-up"
    )
    runners_up: int = Field(3, ge=1, le=8, description="how many runners-up that is about")
    strict: bool = Field(False, description="refuse a step that took longer to compute than the device takes")


_MOST_OF_A_RESOURCE = 1_000_000


class ModelConfig(Section):
    """Where a model comes from and how it is held."""

    source: str = Field("demo", description="`demo`, `emulated`, a folder with safetensors weights, or a .gguf file")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    quantization: Literal["auto", "none", "int8", "fp8"] = Field(
        "auto",
        description="int8 rounds the weights of matrix products to a byte each, with a scale for each output: another, "
        "nearby model, whose step reads as many bytes (on a CPU with float32 and a C compiler, on a GPU with bfloat16 "
        "or float16; else no faster); fp8 rounds them to float8, and what they are multiplied with too, token by token "
        "(a GPU of compute capability 8.9 or higher with bfloat16; else no faster), which is far coarser; auto is "
        "int8 for drafts on a CPU where it is faster, and never for a target",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, …")
    threads: int = Field(0, ge=0, description="CPU threads of the worker; 0 lets placement decide")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Ray resources that its node must have besides CPU and GPU: {draft_node: 1}"
    )
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="processes, each with a device of its own, that hold the model together"
    )
    rank_placement: Literal["STRICT_PACK", "PACK"] = Field(
        "STRICT_PACK",
        description="STRICT_PACK keeps those processes on one node, PACK lets them be on several",
    )
    context_length: int | None = Field(None, ge=16, description="cap on the model's own context, in tokens")
    kv_blocks: int | None = Field(None, ge=1, description="KV pages; None derives them from kv_memory_gib")
    kv_memory_gib: float | None = Field(
        None,
        gt=0,
        description="memory for KV pages, of each process, when kv_blocks is None; None takes most of what a GPU has "
        "free, and on a CPU at most 1 GiB for the target and half of that for a draft",
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="record the usual steps at start and replay them, each at one launch instead of hundreds: CUDA "
        "graphs, which auto takes on a GPU where the model lets it; on a CPU `on` runs the same padded steps and gains "
        "nothing",
    )
    allow_pickle_weights: bool = Field(False, description="also accept .bin/.pt weights (read with weights_only)")
    trust_remote_code: bool = Field(False, description="run Python code that ships with the model folder")
    emulated: EmulatedConfig = Field(default_factory=EmulatedConfig)
    target: str | None = Field(
        None, description="source of the target whose parts a draft shares; None is the deployment's target"
    )
    vocabulary: Literal["same", "intersection"] = Field(
        "same", description="intersection lets a draft have another tokenizer; it drafts with the tokens that both have"
    )

    @field_validator("resources")
    @classmethod
    def _grantable(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory") or not name:
                raise ValueError(f"{name!r} is not a resource of your own; name one that nodes were started with")
            if not 0 < amount <= _MOST_OF_A_RESOURCE or (amount > 1 and amount != int(amount)):
                raise ValueError(f"{amount:g} of {name!r} cannot be asked for; ask for a share up to 1, or for a count")
        return value


NO_SPECULATOR = "none"
"""Instead of the name of a speculator: plain decoding."""


class DraftConfig(Section):
    """Which speculator guesses, and with which model."""

    speculator: str = Field(
        "small_model", description="the name of a file in drafting/, `none`, or the dotted path of your own"
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    dist: Literal["sparse", "dense"] = "sparse"
    top_k: int = Field(64, ge=1, le=4096, description="support of a sparse draft dist")
    ngram_max: int = Field(3, ge=1, le=32, description="ngram: longest suffix looked up")
    ngram_min: int = Field(1, ge=1, le=32, description="ngram, suffix: shortest suffix looked up")
    lookup: Literal["auto", "none", "ngram", "suffix"] = Field(
        "auto",
        description="a model-free speculator beside the draft model: it drafts where more tokens were kept behind "
        "matches of such a length than of the model's drafts, and while the draft worker is away; auto is ngram beside "
        "the demo's drafts, and else none",
    )

    @property
    def looks_up(self) -> Literal["none", "ngram", "suffix"]:
        """`lookup`, decided: the demo's drafts were measured to gain, others were not."""
        if self.lookup != "auto":
            return self.lookup
        return "ngram" if self.model.source == DEMO and self.speculator in ("small_model", "eagle") else "none"

    @property
    def told_names(self) -> str:
        """The speculator, and the one beside it, in words."""
        return self.speculator if self.looks_up == "none" else f"{self.speculator} and {self.looks_up} lookup"

    @model_validator(mode="after")
    def _lookup_beside_a_model(self) -> DraftConfig:
        if self.lookup in ("ngram", "suffix") and self.speculator in (NO_SPECULATOR, "ngram", "suffix"):
            raise ValueError(
                f"lookup {self.lookup} goes beside a draft model, and speculator {self.speculator} has none; set "
                f"speculator to {self.lookup} and leave lookup out"
            )
        return self

    @model_validator(mode="after")
    def _ngram_range(self) -> DraftConfig:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min {self.ngram_min} is above ngram_max {self.ngram_max}")
        return self


_MOST_OUTCOMES = 256


class EngineConfig(Section):
    """Limits of one pipeline."""

    depth: int = Field(4, ge=0, le=64, description="drafted tokens per request and round; 0 is plain decoding")
    depth_policy: Literal["fixed", "adaptive"] = Field(
        "fixed",
        description="fixed drafts to engine.depth in every round; adaptive drafts as deep, or trees as large, as it "
        "measures to pay, for each request, and not at all where plain decoding is faster",
    )
    outcomes: int | Literal["auto"] = Field(
        "auto",
        description="outcomes of a verification drafted for while it runs, per request: 0 drafts only when it is over, "
        "1 goes on behind the whole chain, more also behind what may be refused; auto chooses by measured costs, and 0 "
        "where draft and target share one device or the draft is an EAGLE head",
    )
    fan_out: int = Field(3, ge=1, le=32, description="next tokens guessed at one place of a chain, at most")
    tree: tuple[int, ...] | Literal["dynamic"] | None = Field(
        None,
        description="draft a tree: the children of each token by level, 1 where none are named ([3, 2] at depth 4 is "
        "3, 2, 1, 1), or `dynamic`: children where the draft is most confident; null drafts chains",
    )
    tree_nodes: int = Field(12, ge=1, le=256, description="dynamic trees: drafted tokens per request and round")
    tree_width: int = Field(4, ge=1, le=32, description="dynamic trees: children of a token, and parents in a level")
    rule: str = Field("rejection", description="the name of a rule file in verification/")
    synthetic_acceptance: tuple[float, ...] | None = Field(
        None, description="benchmarks only: how often chain position 1, 2, … is kept under the rule `synthetic`"
    )
    batch_invariant: bool = Field(
        False,
        description="the target's logits are the same bits in any batch and at any depth; float32 on CPUs, slower "
        "without a C compiler",
    )
    max_requests: int = Field(32, ge=1, le=4096, description="requests decoding at once")
    max_batch_tokens: int = Field(512, ge=2, description="positions in one target forward")
    prefill_chunk: int = Field(256, ge=1, description="prompt tokens of one request in one round, at most")
    prefill_budget: int = Field(
        256,
        ge=1,
        description="prompt tokens of all requests in one round while others decode, at most; it bounds how long "
        "prompts hold up running answers",
    )
    prefix_cache: bool = Field(
        True, description="keep the KV of what was read and written, while there is room, for requests that begin alike"
    )
    block_tokens: int = Field(16, ge=1, le=1024, description="positions in one KV block")
    slots: int | None = Field(None, ge=1, description="draft slots; None is enough for every request")
    queue_limit: int = Field(256, ge=0, description="requests waiting for a place before 429")
    draft_wait_s: float = Field(2.0, gt=0, description="longest wait for a draft before a round goes on without it")
    recovery_wait_s: float = Field(120.0, gt=0, description="longest wait for a lost verifier")
    hang_after_s: float = Field(60.0, gt=0, description="a worker that takes longer for one batch is replaced")

    @model_validator(mode="after")
    def _admissible(self) -> EngineConfig:
        # Each decoding request needs one position in every round, and a prompt must still make progress beside them.
        if self.max_batch_tokens < self.max_requests + 1:
            raise ValueError(
                f"max_batch_tokens {self.max_batch_tokens} can never hold max_requests {self.max_requests} decoding "
                f"requests and one prompt token; raise max_batch_tokens to at least {self.max_requests + 1} "
                f"or lower max_requests"
            )
        if self.depth + 1 > self.max_batch_tokens:
            raise ValueError(
                f"depth {self.depth} needs {self.depth + 1} positions for one request, "
                f"but max_batch_tokens is {self.max_batch_tokens}"
            )
        if self.slots is not None and self.depth > self.slots:
            raise ValueError(f"depth {self.depth} needs {self.depth} slots for one request, but slots is {self.slots}")
        return self

    @model_validator(mode="after")
    def _countable_outcomes(self) -> EngineConfig:
        if self.outcomes != "auto" and not 0 <= self.outcomes <= _MOST_OUTCOMES:
            raise ValueError(f"outcomes {self.outcomes} must be auto, or from 0 to {_MOST_OUTCOMES}")
        return self

    @model_validator(mode="after")
    def _synthetic_profile(self) -> EngineConfig:
        profile = self.synthetic_acceptance
        if profile is None:
            if self.rule == "synthetic":
                raise ValueError("rule synthetic makes up acceptance; set synthetic_acceptance, e.g. [0.8, 0.6, 0.5]")
            return self
        if not all(0 <= rate <= 1 for rate in profile) or sorted(profile, reverse=True) != list(profile):
            raise ValueError(f"synthetic_acceptance {list(profile)} must be shares from 0 to 1 that never rise")
        return self

    @model_validator(mode="after")
    def _growable_tree(self) -> EngineConfig:
        shape = self.tree_shape
        if shape is None:
            return self
        if self.tree != "dynamic" and not 1 <= len(self.tree or ()) <= self.depth:
            raise ValueError(f"tree {list(self.tree or ())} must name 1 to depth = {self.depth} levels")
        if min(shape.branching or (1,)) < 1 or shape.nodes(self.depth) >= self.max_batch_tokens:
            raise ValueError(
                f"a tree of {shape.nodes(self.depth)} tokens needs a position for each and one for its root in one "
                f"batch of max_batch_tokens {self.max_batch_tokens}, and at least one child everywhere"
            )
        # An adaptive depth bounds lookups, too, which need no nodes.
        if self.depth_policy == "fixed" and shape.nodes(self.depth) < self.depth:
            raise ValueError(f"tree_nodes {self.tree_nodes} is below depth {self.depth}: a path needs as many")
        if self.slots is not None and shape.parents(self.depth) > self.slots:
            raise ValueError(f"the tree needs {shape.parents(self.depth)} slots for a request, slots is {self.slots}")
        if self.outcomes not in ("auto", 0):
            raise ValueError(
                "trees are drafted behind a verdict, which tells the token that they grow from (ahead of it every "
                "outcome would need a tree of its own); set outcomes to 0 or auto, or leave tree out"
            )
        return self

    @property
    def told_depth(self) -> str:
        """How far requests are drafted, for people."""
        how = {"fixed": "", "adaptive": "at most "}[self.depth_policy]
        shape = self.tree_shape
        trees = "" if shape is None else f" in trees of {how}{shape.nodes(self.depth)} nodes"
        return f"depth {how}{self.depth}{trees}"

    @property
    def tree_shape(self) -> TreeShape | None:
        """The limits of drafted trees; None where chains are drafted."""
        if self.tree is None or not self.depth:
            return None
        if self.tree == "dynamic":
            return TreeShape(None, self.tree_width, self.tree_nodes)
        return static((*self.tree, *[1] * (self.depth - len(self.tree))))

    @property
    def slot_count(self) -> int:
        """Slots in the pool: unless fixed by `slots`, enough for every request's chain and all its branches."""
        if self.slots is not None:
            return self.slots
        if self.tree_shape is not None:
            return self.max_requests * self.tree_shape.parents(self.depth)
        longest = self.depth + (self.most_outcomes > 0 and self.depth > 0)  # drafted ahead, one token is not offered
        return max(1, self.max_requests * longest * (1 + self.most_outcomes))

    def of_several(self, pipelines: int) -> EngineConfig:
        """The limits of a worker that serves so many pipelines at once, each within these."""
        most = {"max_requests": self.max_requests, "max_batch_tokens": self.max_batch_tokens, "slots": self.slot_count}
        return self.model_copy(update={name: pipelines * limit for name, limit in most.items()})

    @property
    def ranks(self) -> int:
        """Likely tokens kept beside each drafted one: the guesses at one place, and the drafted token itself."""
        return 0 if self.outcomes == 0 or self.tree is not None else self.fan_out + 1

    @property
    def most_outcomes(self) -> int:
        """Branches that one request may have: at each chain position `fan_out` corrections, and what may follow all."""
        every = self.depth * self.fan_out + self.fan_out + 1
        return every if self.outcomes == "auto" else min(self.outcomes, every)


class ServerConfig(Section):
    """The HTTP side. Limits hold for each ingress replica."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    ssl_certfile: str | None = Field(None, description="PEM certificate chain; with it the endpoint speaks HTTPS only")
    ssl_keyfile: str | None = Field(None, description="private key of the certificate, without a password")
    api_keys: tuple[SecretStr, ...] = Field(
        (), description="keys of clients; once there is one, every request needs one"
    )
    admin_key: SecretStr | None = Field(None, description="key that /metrics and /load need; None lets any key do")
    open_metrics: bool = Field(False, description="/metrics without a key")
    cors_origins: tuple[str, ...] = Field((), description="origins whose pages may call, e.g. https://chat.example.org")
    strict_params: bool = Field(False, description="refuse unknown request fields instead of ignoring them")
    max_inflight: int = Field(512, ge=1, description="POST requests worked on at once before a 429")
    max_inflight_per_key: int | None = Field(None, ge=1, description="POST requests of one API key at once")
    max_header_bytes: int = Field(16 * 1024, ge=256)
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024)
    body_timeout_s: float = Field(60.0, gt=0, description="longest time for a body to arrive")
    max_prompts: int = Field(1024, ge=1, description="prompts in one request")
    max_stop_strings: int = Field(4, ge=1)
    max_stop_length: int = Field(256, ge=1, description="characters of one stop string")
    max_schema_bytes: int = Field(
        64 * 1024, ge=1, description="UTF-8 bytes of a request's JSON schema, regex, choices, grammar or tools"
    )
    max_tools: int = Field(128, ge=1, description="tools in one request")
    max_logprobs: int = Field(20, ge=0, le=20, description="alternatives beside each token")
    sampling_defaults: Literal["model", "openai"] = Field(
        "model", description="what holds where a request says nothing: the model's generation_config.json, or plain 1.0"
    )
    default_max_tokens: int = Field(16, ge=1, description="answer length of /v1/completions when none is asked for")
    max_n: int = Field(128, ge=1, description="answers to one prompt in one request")
    request_timeout_s: float = Field(600.0, gt=0, description="longest time for an answer; a request may ask for less")
    sse_keepalive_s: float = Field(
        0.0, ge=0, description="silence in a stream after which a comment is sent, for proxies in between; 0 sends none"
    )

    @property
    def open_to_others(self) -> bool:
        """Other machines may ask, without a key."""
        return self.host not in _LOOPBACK and not self.api_keys

    @property
    def scheme(self) -> Literal["http", "https"]:
        """How addresses of this server begin."""
        return "http" if self.ssl_certfile is None else "https"

    @model_validator(mode="after")
    def _certificate_with_key(self) -> ServerConfig:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile go together: give both, or none for plain HTTP")
        return self

    @field_validator("api_keys", "admin_key")
    @classmethod
    def _usable_keys(cls, value: tuple[SecretStr, ...] | SecretStr | None) -> tuple[SecretStr, ...] | SecretStr | None:
        keys = value if isinstance(value, tuple) else () if value is None else (value,)
        if not all(len(key) >= _SHORTEST_KEY and key.get_secret_value().isascii() for key in keys):
            raise ValueError(f"a key must have at least {_SHORTEST_KEY} ASCII characters")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _usable_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest):
                raise ValueError(f"{origin!r} is no origin; write a scheme and a host, e.g. https://chat.example.org")
        return value


class ClusterConfig(Section):
    """How Ray hosts pipelines."""

    transport: Literal["socket", "ray"] = "socket"
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    pipelines: int = Field(1, ge=1, le=1024, description="pipelines, each a coordinator and workers of its own")
    max_pipelines: int | None = Field(None, ge=1, le=1024, description="scale up to so many by load; None never does")
    pipeline_load: float | None = Field(
        None, gt=0, description="sequences for each pipeline that scaling aims at; None is engine.max_requests"
    )
    spare_pipelines: int = Field(
        0, ge=0, description="pipelines for which there is room beside the others while an update replaces them"
    )
    pipelines_per_draft: int = Field(
        1,
        ge=1,
        le=64,
        description="pipelines that one draft worker drafts for, each with an equal part of its KV and of its slots; "
        "1 gives each pipeline a draft worker of its own",
    )
    routing: Literal["prefix", "least_loaded", "round_robin"] = Field(
        "prefix",
        description="which pipeline takes a request: the one with the longest prefix of its prompt, the idlest",
    )
    routing_slack: int = Field(
        4, ge=0, description="requests that a pipeline may have above the idlest and still be taken for its prefix"
    )
    ingress_replicas: int = Field(1, ge=1, le=64, description="HTTP processes in front of the pipelines")
    max_ingress_replicas: int | None = Field(
        None, ge=1, le=64, description="scale up to so many by requests being answered; None never does"
    )
    scale_up_after_s: float = Field(
        30.0, ge=0, description="how long the load must ask for more before more are started"
    )
    scale_down_after_s: float = Field(600.0, ge=0, description="how long the load must ask for less before some drain")
    start_timeout_s: float = Field(600.0, gt=0)
    wait_for_nodes_s: float = Field(
        0.0, ge=0, description="longest wait for nodes to join that can hold the pipeline; 0 refuses at once"
    )
    heartbeat_s: float = Field(0.2, gt=0)
    lost_after_s: float = Field(1.5, gt=0, description="silence after which a worker's process counts as lost")
    slow_link_s: float = Field(
        0.001, gt=0, description="round trip between coordinator and worker that a warning is given from"
    )

    @model_validator(mode="after")
    def _scalable(self) -> ClusterConfig:
        for least, most in (("pipelines", "max_pipelines"), ("ingress_replicas", "max_ingress_replicas")):
            limit = getattr(self, most)
            if limit is not None and limit < getattr(self, least):
                raise ValueError(f"{most} {limit} is below {least} {getattr(self, least)}; raise it, or leave it out")
        return self

    @model_validator(mode="after")
    def _shareable(self) -> ClusterConfig:
        if self.pipelines_per_draft > 1 and self.transport != "socket":
            raise ValueError(
                f"pipelines_per_draft {self.pipelines_per_draft} needs transport socket (found {self.transport}): by "
                f"plain calls a draft worker answers one pipeline after the other"
            )
        return self

    @property
    def most_pipelines(self) -> int:
        """Pipelines that may run at once, those of an update included."""
        return (self.max_pipelines or self.pipelines) + self.spare_pipelines

    @property
    def draft_workers(self) -> int:
        """Draft workers that pipelines share, as many as give each pipeline its part of one."""
        return -(-self.most_pipelines // self.pipelines_per_draft)


class SloConfig(Section):
    """What a request is promised; goodput counts those that met all of it."""

    ttft_s: float = Field(2.0, gt=0, description="longest time to the first token")
    tpot_s: float = Field(0.2, gt=0, description="longest mean time per token after the first one")
    e2e_s: float = Field(60.0, gt=0, description="longest time to the last token")


class TracingConfig(Section):
    """Where the spans of requests go, if anywhere; needs the extra specserve[tracing]. See docs/tracing.md."""

    exporter: Literal["none", "otlp", "file", "console"] = "none"
    endpoint: str = Field("http://127.0.0.1:4318/v1/traces", description="otlp: where a collector takes spans by HTTP")
    path: str | None = Field(None, description="file: absolute path; one span as JSON a line, behind what is there")
    share: float = Field(1.0, ge=0, le=1, description="requests traced, of those whose traceparent does not say")

    @field_validator("endpoint")
    @classmethod
    def _usable_endpoint(cls, value: str) -> str:
        scheme, _, rest = value.partition("://")
        if scheme not in ("http", "https") or not rest:
            raise ValueError(f"{value!r} is no address; write one with its path, e.g. http://127.0.0.1:4318/v1/traces")
        return value

    @model_validator(mode="after")
    def _usable_path(self) -> TracingConfig:
        # Actors have working folders of their own.
        if self.exporter == "file" and not Path(self.path or "").is_absolute():
            raise ValueError(f"exporter file needs an absolute path (found path {self.path!r})")
        return self


class ObserveConfig(Section):
    """What is told about the server, and to whom."""

    slo: SloConfig = Field(default_factory=SloConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)
    vllm_aliases: bool = Field(True, description="also export vllm:spec_decode_…, which benchmark clients look for")
    ray_metrics: bool = Field(False, description="mirror all metrics into those that Ray exports on every node")


class Config(Section):
    """The root."""

    model_name: str | None = Field(None, description="name served to clients; None derives it from target.source")
    target: ModelConfig = Field(default_factory=ModelConfig)
    draft: DraftConfig = Field(default_factory=DraftConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    observe: ObserveConfig = Field(default_factory=ObserveConfig)
    log_format: Literal["text", "json"] = Field("text", description="form of log lines")

    @model_validator(mode="after")
    def _one_language(self) -> Config:
        target, draft = self.target, self.draft.model
        if target.source == draft.source == "emulated" and target.emulated.seed != draft.emulated.seed:
            raise ValueError(
                f"target.emulated.seed {target.emulated.seed} and draft.model.emulated.seed {draft.emulated.seed} make "
                f"two unrelated languages; an emulated draft knows its target's only with the same seed"
            )
        return self

    @model_validator(mode="after")
    def _one_process_where_bits_count(self) -> Config:
        if self.engine.batch_invariant and self.target.tensor_parallel > 1:
            raise ValueError(
                f"engine.batch_invariant is not there for target.tensor_parallel {self.target.tensor_parallel}, "
                f"where sums over processes depend on their size; switch one of them off"
            )
        return self

    @property
    def draft_model(self) -> ModelConfig:
        """The draft's model, which knows its target. The demo has a head, too, for the speculator that reads one."""
        named = self.draft.model
        reads_head = named.source == DEMO and self.draft.speculator == "eagle"
        source = DEMO_HEAD if reads_head else named.source
        return named.model_copy(update={"target": named.target or self.target.source, "source": source})

    @property
    def worker_processes(self) -> int:
        """Processes of one pipeline that hold models, at most."""
        return self.target.tensor_parallel + self.draft.model.tensor_parallel

    @property
    def told_drafts(self) -> str:
        """What is drafted and how far, for people; or that nothing is, and by which setting."""
        if self.engine.depth == 0:
            return "none, as engine.depth is 0"
        if self.draft.speculator == NO_SPECULATOR:
            return f"none, as draft.speculator is {NO_SPECULATOR}"
        return f"{self.draft.told_names}, {self.engine.told_depth}"

    @property
    def served_name(self) -> str:
        """The model id that clients use."""
        if self.model_name is not None:
            return self.model_name
        if self.target.source == DEMO:
            return "smollm2-135m-instruct"
        return Path(self.target.source).stem.lower()


def parse(data: object, where: str = "config") -> Config:
    """Build a Config from plain data. Raises ConfigError that names each wrong key and value."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping of settings, found {type(data).__name__}")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        problems = error.errors()
        lines = [f"{where}: {len(problems)} problem{'s' if len(problems) > 1 else ''}"]
        lines += [f"  {_told(problem)}" for problem in problems[:_MOST_PROBLEMS]]
        if len(problems) > _MOST_PROBLEMS:
            lines.append(f"  and {len(problems) - _MOST_PROBLEMS} more")
        raise ConfigError("\n".join(lines)) from None


def keyed(config: Config, environment: Mapping[str, str]) -> Config:
    """The configuration with the keys of SPECSERVE_API_KEY (several with commas between) and SPECSERVE_ADMIN_KEY.

    They replace those of the file, so that keys need not stand in files. Raises ConfigError for unusable ones.
    """
    keys: dict[str, Any] = {}
    if clients := environment.get("SPECSERVE_API_KEY"):
        keys["server.api_keys"] = [key.strip() for key in clients.split(",")]
    if admin := environment.get("SPECSERVE_ADMIN_KEY"):
        keys["server.admin_key"] = admin
    return parse(override(config.model_dump(), keys), where="environment") if keys else config


def client_key(environment: Mapping[str, str]) -> str | None:
    """The key that a client sends: the first of SPECSERVE_API_KEY, which may name several for a server."""
    return environment.get("SPECSERVE_API_KEY", "").split(",")[0].strip() or None


def unkeyed(config: Config) -> Config:
    """The configuration without keys and certificate, for a server that only its own process asks."""
    open_one = {"api_keys": (), "admin_key": None, "ssl_certfile": None, "ssl_keyfile": None}
    server = config.server.model_copy(update=open_one)
    return config.model_copy(update={"server": server})


def setting_names(section: type[BaseModel] = Config) -> Iterator[str]:
    """Every setting by its dotted name, e.g. `engine.depth`."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from (f"{name}.{below}" for below in setting_names(kind))
        else:
            yield name


def changed_settings(config: Config) -> list[str]:
    """Every setting that is not as it is by default, as --set would have it. Keys are not shown."""
    found, usual = (each.model_dump(mode="json") for each in (config, Config()))
    pairs = ((name, _at(found, name), _at(usual, name)) for name in setting_names())
    return [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value, was in pairs if value != was
    ]


def _at(tree: dict[str, Any], dotted: str) -> Any:
    value: Any = tree
    for part in dotted.split("."):
        value = value[part]
    return value


_MOST_PROBLEMS = 10
_SHORTEST_KEY = 8
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "literal": "a word",
}

_BOUNDS = {
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be below {lt:g}",
}


def _told(problem: ErrorDetails) -> str:
    """One problem that pydantic found, in a line for people."""
    place = ".".join(str(part) for part in problem["loc"]) or "(root)"
    kind, value, context = problem["type"], _input(problem), problem.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown setting {place}{_suggestion(place)}"
    if kind == "model_type":
        return f"{place} is a section with settings of its own, such as {_example(place)} (found {_shown(value)})"
    if kind == "value_error":
        return f"{place}: {context['error']}"
    if kind in _BOUNDS:
        return f"{place} {_BOUNDS[kind].format(**context)} (found {_shown(value)})"
    return _wrong_kind(place, problem)


def _wrong_kind(place: str, problem: ErrorDetails) -> str:
    kind, value = problem["type"], _input(problem)
    wanted = _KINDS.get(kind.split("_", maxsplit=1)[0])
    if wanted is None:
        return f"{place}: {problem['msg']} (found {_shown(value)})"
    if isinstance(value, dict):
        return f"{place} is {wanted}, not a section with settings of its own (found {', '.join(map(str, value))})"
    wanted = f"one of {problem['ctx']['expected']}" if kind == "literal_error" else wanted
    return f"{place}: expected {wanted} (found {_shown(value)})"


def _input(problem: ErrorDetails) -> Any:
    """What was found; keys are not shown to anybody."""
    return "***" if "key" in str(problem["loc"]) else problem["input"]


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)


def _example(section: str) -> str:
    return next((name for name in setting_names() if name.startswith(f"{section}.")), "a setting")


def _suggestion(place: str) -> str:
    """The setting that was most likely meant: one of the same last name elsewhere, or one spelt nearly alike."""
    names = list(setting_names())
    last = place.rpartition(".")[2]
    near = [name for name in names if name.rpartition(".")[2] == last] or get_close_matches(place, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def load(path: Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read a YAML file and lay dotted overrides such as {"engine.depth": 2} over it.

    Raises ConfigError when the file is missing, is not YAML, or holds a wrong key or value.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    return parse(override({} if data is None else data, overrides or {}), where=str(path))


def override(data: object, overrides: dict[str, Any]) -> object:
    """Return `data` with dotted keys replaced, e.g. {"draft.speculator": "ngram"}. The input is left as it was."""
    if not isinstance(data, dict):
        return data
    result: dict[str, Any] = dict(data)
    for dotted, value in overrides.items():
        parts = dotted.split(".")
        here = result
        for part in parts[:-1]:
            below = here.get(part)
            here[part] = dict(below) if isinstance(below, dict) else {}
            here = here[part]
        here[parts[-1]] = value
    return result
