"""Any transformers causal model whose layers attend through transformers' attention interface, on paged KV.

The model's own modules run unchanged on flat tokens [1, T] without padding; one attention function keeps keys and
values in pages and knows the rows (block tables as in PagedAttention, Kwon et al. 2023). Logits are computed for
the wanted tokens only. On a CPU the Llama kind has shorter ways through the same weights (`_native_decoder`, and
without a compiler `_flat_decoder`). On a GPU the usual steps are recorded and replayed (`_step_graphs`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import (
    Move,
    RaggedBatch,
    _attention,
    _attention_choice,
    _invariance,
    _linear,
    _refusals,
    _rope,
    loading,
)
from specserve.models._flat_decoder import FlatDecoder
from specserve.models._invariant_step import InvariantStep
from specserve.models._native_decoder import Anatomy, NativeDecoder
from specserve.models._observer import Observer
from specserve.models._pages import Gathered, LayerLayout, LayoutProbe, PagedAttention, PagedStep, Pages
from specserve.models._recorded_model import RecordedModel
from specserve.models._recorder import Recorder
from specserve.models._row_groups import RaggedPlan
from specserve.models._static_plan import StaticInputs
from specserve.models._step_graphs import StepGraphs, graph_bytes
from specserve.models._step_shapes import StepShape

log = logging.getLogger(__name__)


def build(config: ModelConfig, folder: Path) -> PagedTransformers:
    """Load the folder that `loading.prepare` returned. Raises ConfigError for what cannot be served."""
    described = loading.load_model_config(folder, config)
    _refusals.refuse_unservable(described)
    loading.apply_threads(config.threads)
    return PagedTransformers(loading.load_model(folder, config), config.context_length)


class PagedTransformers(RecordedModel):
    """A `Backend`. The model must be in eval mode; its attention, its rope factors and, for float32 on the CPU, its
    linear layers are replaced.

    context_length None serves the length that the model was trained for; a larger one is honoured as far as a
    scaling rope (dynamic NTK, YaRN) reaches. See `_rope` for the factors that belong to it.
    """

    def __init__(self, model: Any, context_length: int | None) -> None:
        _refusals.refuse_unservable(model.config)
        _refusals.refuse_model_class(model)
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise ConfigError(f"{type(model).__name__} cannot compute logits for chosen positions (logits_to_keep)")
        super().__init__(model.device, model.dtype, _rope.served_context(model.config, context_length))
        self._model = model
        _rope.freeze(model, self._context_length)
        model.set_attn_implementation(_attention.NAME)
        _linear.speed_up(model)
        self._layouts, self._heads, self._vocab_size = self._discover()
        self._flat = FlatDecoder.of(model, self._layouts)
        self._native = None if self._flat is None else NativeDecoder.of(_anatomy(model, self._layouts))
        self._invariant = False
        self._observer: Observer | None = None
        self._attention: PagedAttention = Gathered()
        self._graphs: StepGraphs | None = None
        self._was_replayed = False

    @property
    def model(self) -> Any:
        """What runs here, for heads that share parts of it."""
        return self._model

    def allocate(self, blocks: int, block_tokens: int) -> None:
        """See `Backend`."""
        super().allocate(blocks, block_tokens)
        layers = [(layout, self._heads[layer]) for layer, layout in self._layouts.items()]
        self._attention = _attention_choice.chosen(layers, block_tokens, self._device)
        if self._native is not None:
            self._native.bind(self.pages)

    def step_bytes(self, block_tokens: int) -> int:
        """See `RecordsSteps`."""
        if not self._planned:
            return 0
        config = self._model.config
        return graph_bytes(
            self._planned,
            self._layouts.values(),
            block_tokens,
            vocab_size=self._vocab_size,
            heads=max(self._heads.values(), default=0),
            width=max(config.hidden_size, getattr(config, "intermediate_size", None) or 0),
            itemsize=self._dtype.itemsize,
        )

    def record_with(self, recorder: Recorder) -> Iterator[StepShape]:
        """`record_steps` by a way of one's own."""
        graphs = StepGraphs(
            self._compute_recorded,
            self.pages,
            self._planned,
            recorder,
            vocab_size=self._vocab_size,
            attention=self._attention,
            states=None if self._observer is None else self._observer.states,
            null_block=self._null_block(),
            dtype=self._dtype,
            device=self._device,
        )
        yield from graphs.record()
        self._graphs = graphs

    @property
    def attention(self) -> PagedAttention:
        """How its eager and recorded steps attend over pages; steps in C have their own way."""
        return self._attention

    @property
    def graphs(self) -> StepGraphs | None:
        """The recorded steps, once there are any."""
        return self._graphs

    def move(self, moves: Sequence[Move]) -> None:
        """See `HoldsTrees`."""
        self.pages.move(moves)

    def make_batch_invariant(self) -> None:
        """See `Backend`. Our own kernels are so at no cost; else a position has a call of attention of its own."""
        if self._device.type != "cpu" or self._dtype != torch.float32:
            raise ConfigError(
                f"batch_invariant is there for float32 targets on a CPU; this one is {self._dtype} on {self._device}"
            )
        if self._native is not None:
            return
        _invariance.make_invariant(self._model)
        self._flat = None  # its activations and norms are not made row by row
        self._invariant = True

    def observe(self, layers: Sequence[int]) -> None:
        """See `ShowsHidden`."""
        if self._graphs is not None:
            log.warning(
                "hidden states are read of this model, whose steps were recorded without them; they are not used"
            )
            self._graphs = None
        self._observer = Observer(self._model, layers)
        self._flat = None  # it goes past the modules that are observed
        if self._native is not None:
            self._native.observe(layers)

    def observed(self) -> torch.Tensor:
        """See `ShowsHidden`."""
        if self._graphs is not None and self._was_replayed:
            return self._graphs.observed()
        if self._native is not None:
            return self._native.observed()
        if self._observer is None:
            raise ConfigError("the backend was asked for hidden states that nobody observes")
        return self._observer.states()

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the batch's KV and return float32 logits [m, vocab_size] of the wanted tokens."""
        replayed = None if self._graphs is None else self._graphs.run(batch)
        self._was_replayed = replayed is not None
        if replayed is not None:
            return replayed
        if self._native is not None:
            return self._native.run(batch)
        run = self._run if self._flat is None else self._flat.run
        return run(batch.tokens, batch.standing(), batch.wanted, self._step(self.pages, batch))

    def _step(self, pages: Pages, batch: RaggedBatch) -> _attention.KeyValueStore:
        if self._invariant:
            return InvariantStep(pages, batch)
        return PagedStep(pages, RaggedPlan(batch, pages.block_tokens, self._dtype, self._device), self._attention)

    def _run(self, tokens: Any, positions: Any, wanted: Any, store: _attention.KeyValueStore) -> torch.Tensor:
        there = [torch.from_numpy(each).to(self._device, non_blocking=True) for each in (tokens, positions, wanted)]
        return self._compute(there[0], there[1], there[2], store)

    def _compute(
        self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, store: _attention.KeyValueStore
    ) -> torch.Tensor:
        """The model's own way, all on its device; float32 logits [m, V]."""
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            paged=store,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _compute_recorded(
        self, inputs: StaticInputs, positions: torch.Tensor, store: _attention.KeyValueStore
    ) -> torch.Tensor:
        return self._compute(inputs.tokens.view(-1), positions, inputs.wanted, store)

    @torch.inference_mode()
    def _discover(self) -> tuple[dict[int, LayerLayout], dict[int, int], int]:
        """Learn from one tiny forward what each layer keeps; a model that cannot be paged is refused here."""
        probe = LayoutProbe()
        two = np.arange(2, dtype=np.int64)
        logits = self._run(np.zeros(2, dtype=np.int64), two, two, probe)
        windows = {layer: layout.window for layer, layout in probe.layouts.items()}
        _refusals.refuse_unseen_windows(self._model.config, windows)
        return dict(sorted(probe.layouts.items())), probe.heads, logits.shape[-1]


def _anatomy(model: Any, layouts: Mapping[int, LayerLayout]) -> Anatomy:
    """Of a model that has a flat form."""
    body = model.model
    embedding, head = body.embed_tokens.weight, model.get_output_embeddings()
    return Anatomy(embedding, body.rotary_emb, body.layers, layouts, body.norm, head)
