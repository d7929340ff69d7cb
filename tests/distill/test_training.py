"""From a corpus to a draft that serves."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from listening import Listener
from safetensors.torch import load_file
from tiny_models import tiny_llama

from specserve.config import ModelConfig
from specserve.distill import checkpoints, corpus, training, vocabulary
from specserve.distill.optimiser import InputScaledAdamW
from specserve.distill.precision import quick_dtype
from specserve.distill.run import Options, distill
from specserve.distill.small import SmallStudent
from specserve.distill.training import Head, Schedule
from specserve.errors import ConfigError
from specserve.local import LocalEngine
from specserve.models import _reduced_head, loading, trained_draft
from specserve.models import vocabulary as vocabularies
from specserve.types import Request, RequestId, Sampling

IDS = 200
SCHEDULE = Schedule(steps=30, batch_tokens=1024, learning_rate=3e-3, warm_up=5, measure_every=10, depth=3, seed=1)
WARM = replace(SCHEDULE, greedy_share=0.0)  # taught by the dist alone


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECSERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"), seed=3, layers=3)


@pytest.fixture(scope="module")
def target(target_folder):
    return loading.load_model(target_folder, ModelConfig(source=str(target_folder), device="cpu"))


@pytest.fixture(scope="module")
def options(tmp_path_factory, target_folder):
    base = tmp_path_factory.mktemp("distilled")
    return Options(
        target=str(target_folder),
        out=base / "draft",
        work=base / "work",
        tokens=8_000,
        rows=24,
        layers=(0, 2),
        ids=IDS,
        device="cpu",
        schedule=SCHEDULE,
    )


@pytest.fixture(scope="module")
def distilled(options):
    """The draft's folder, and what was told on the way."""
    listener = Listener()
    return distill(options, listener), listener


def measured(student, target, options):
    ids = load_file(options.work / "run" / "ids.safetensors")["ids"]
    held_out = training.split(options.work / "corpus")[1]
    return training.evaluate(student, Head(target.lm_head.weight, ids, torch.float32), held_out, 3, 100)


def test_training_makes_the_student_agree_more(distilled, target, options):
    """On held-out answers the best student keeps more than the layers that it started from."""
    student = SmallStudent(target, options.layers)
    before = measured(student, target, options)
    student.load_state_dict(checkpoints.load_best(options.work / "run"))
    after = measured(student, target, options)
    assert after.tokens_per_round > before.tokens_per_round + 0.05
    assert distilled[1].stages["training"] == (30, 30)
    assert distilled[1].stages["writing text"] == (8_000, 8_000)


def test_the_closed_form_readout_brings_states_nearer(distilled, target, options):
    """Before any step, the fitted matrix leaves a smaller squared distance to the target's states than none."""
    student = SmallStudent(target, options.layers)
    examples = corpus.read_shard(corpus.shards(options.work / "corpus")[0])[:40]
    before = distance(student, examples)
    student.fit(examples)
    assert distance(student, examples) < 0.9 * before


@torch.no_grad()
def distance(student, examples):
    pairs = [
        (next(student.unrolled(one.tokens[None], one.hidden[None], 1))[0], one.hidden.float(), one.start)
        for one in examples
    ]
    return float(sum((mine[start:] - theirs[start:]).square().sum() for mine, theirs, start in pairs))


def test_only_what_was_trained_is_written(distilled, target_folder, options):
    """Two layers, a norm, a readout and ids; no embedding, no head, no tokenizer."""
    folder, _ = distilled
    assert sorted(path.name for path in folder.iterdir()) == [trained_draft.DESCRIPTION, trained_draft.WEIGHTS]
    assert (folder / trained_draft.WEIGHTS).stat().st_size < 0.5 * (target_folder / "model.safetensors").stat().st_size


def test_the_written_draft_computes_what_the_student_did(distilled, target, options):
    """The completed folder's logits are the best student's, in bfloat16, for its ids, and −∞ elsewhere."""
    folder = loading.prepare(ModelConfig(source=str(distilled[0])), print, role="draft")
    draft = loading.load_model(folder, ModelConfig(source=str(folder), device="cpu"))
    student = SmallStudent(target, options.layers)
    student.load_state_dict({k: v.bfloat16() for k, v in checkpoints.load_best(options.work / "run").items()})
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        logits = draft(input_ids=tokens).logits
        wanted = next(student.unrolled(tokens, tokens, 1)) @ target.lm_head.weight.T
    said = logits.isfinite().all(1)[0].nonzero().squeeze(1)
    assert len(said) == IDS
    torch.testing.assert_close(logits[..., said], wanted[..., said], atol=1e-3, rtol=1e-3)
    assert (logits.isneginf().sum(-1) == logits.shape[-1] - IDS).all()
    assert vocabularies.check(folder, folder, logits.shape[-1], logits.shape[-1]) <= logits.shape[-1]


def test_serving_takes_the_folder_and_keeps_the_targets_answers(distilled, target_folder):
    """With the draft, greedy answers and, under `coupled`, seeded ones are those without; drafted tokens are kept."""
    tree = {
        "target": {"source": str(target_folder), "kv_memory_gib": 0.1},
        "draft": {"model": {"source": str(distilled[0]), "kv_memory_gib": 0.1}},
        "engine": {"depth": 3, "max_requests": 4},
    }
    requests = [
        Request(
            RequestId(f"{t}-{i}"), tuple(range(5 + i, 25 + i)), 40, Sampling(t), seed=i, ignore_eos=True, rule="coupled"
        )
        for t in (0.0, 1.0)
        for i in range(3)
    ]
    with LocalEngine(tree) as engine:
        done = engine.complete(requests)
    with LocalEngine(tree | {"engine": {"depth": 0, "max_requests": 4}}) as engine:
        plain = engine.complete(requests)
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    assert sum(one.stats.kept_tokens for one in done[:3]) > 0
    assert sum(one.stats.kept_tokens for one in done[3:]) > 0


def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(distilled, target, options, tmp_path):
    """Stopped after its second measure and called again, it ends with the same weights, bit by bit.

    Taught by dists alone, it is a better draft for sampled answers than the layer that it started from.
    """
    texts = options.work / "corpus"
    ids = vocabulary.likeliest_ids(corpus.examples_of(corpus.shards(texts)), target.config.vocab_size, IDS)
    head, results = Head(target.lm_head.weight, ids, torch.float32), []
    for name, patience in (("whole", math.inf), ("cut", 1)):
        folder = tmp_path / name
        folder.mkdir()
        try:
            training.train(SmallStudent(target, (0,)), head, texts, folder, WARM, Listener(patience))
        except KeyboardInterrupt:
            assert checkpoints.load_run(folder, *fresh(target))[0] == 10
            training.train(SmallStudent(target, (0,)), head, texts, folder, WARM, Listener())
        student, optimiser = fresh(target)
        assert checkpoints.load_run(folder, student, optimiser)[0] == 30
        results.append(student.state_dict())
    assert measured(student, target, options).overlap > measured(fresh(target)[0], target, options).overlap + 0.005
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def fresh(target):
    student = SmallStudent(target, (0,))
    return student, InputScaledAdamW(student, weight_decay=0.0)


def test_calling_again_does_nothing_twice(distilled, options):
    """With corpus and training done, a second call writes no text and takes no step."""
    listener = Listener()
    before = {path: path.stat().st_mtime_ns for path in corpus.shards(options.work / "corpus")}
    distill(options, listener)
    assert listener.stages == {}
    assert {path: path.stat().st_mtime_ns for path in corpus.shards(options.work / "corpus")} == before


def test_training_begins_at_a_trained_draft(distilled, options, target, tmp_path):
    """With a rate of next to nothing the draft that is written is the one that was begun at, vocabulary included."""
    again = replace(options, out=tmp_path / "draft", work=tmp_path / "work", start=options.out, ids=64)
    shutil.copytree(options.work / "corpus", again.work / "corpus")
    distill(replace(again, schedule=replace(SCHEDULE, steps=1, learning_rate=1e-9)), Listener())
    was, now = (load_file(folder / trained_draft.WEIGHTS) for folder in (options.out, again.out))
    assert was.keys() == now.keys()
    assert all(torch.equal(was[name], now[name]) for name in was)


def test_a_draft_that_training_cannot_begin_at_is_refused(distilled, options, target, tmp_path):
    """Of other layers, of more of them, or none at all: said before anything is changed."""
    with pytest.raises(ConfigError, match=r"layers \[0, 2\], and --layers says \[0, 1\]"):
        SmallStudent(target, (0, 1)).begin_at(options.out)
    with pytest.raises(ConfigError, match=r"trained_draft\.json"):
        SmallStudent(target, (0, 2)).begin_at(tmp_path)
    description = trained_draft.read_description(options.out)
    weights = load_file(options.out / trained_draft.WEIGHTS)
    trained_draft.write(tmp_path, description, weights | {"readout.weight": torch.zeros(64, 32)})
    with pytest.raises(ConfigError, match=r"its readout\.weight is \[64, 32\].*has \[64, 64\]"):
        SmallStudent(target, (0, 2)).begin_at(tmp_path)


def test_what_is_computed_in_follows_from_the_device(distilled):
    """GPUs multiply bfloat16 quickly, CPUs where they have instructions for it; the log says which it is."""
    assert quick_dtype(torch.device("cuda")) == "bfloat16"
    flags = set(Path("/proc/cpuinfo").read_text().split())
    cpu = quick_dtype(torch.device("cpu"))
    if not flags & {"amx_tile", "avx512_bf16"}:
        assert cpu == "float32"
    assert any(f"computing in {cpu}" in line for line in distilled[1].lines)


def test_a_run_of_another_student_is_not_gone_on_with(distilled, options):
    """Other layers need another working folder."""
    with pytest.raises(ConfigError, match="another student"):
        distill(replace(options, layers=(0, 1, 2)), Listener())


def test_a_file_is_read_once_and_makes_a_draft(target_folder, tmp_path):
    """A file with fewer tokens than asked for is taken whole; a second call reads nothing twice."""
    file = tmp_path / "some.txt"
    file.write_text("\n\n".join(f"the dog and the cat number {n} went to the sea " * 20 for n in range(12)))
    wanted = Options(
        str(target_folder), tmp_path / "draft", tmp_path / "work", data=file, tokens=4000, layers=(1,), ids=64
    )
    wanted = replace(wanted, device="cpu", schedule=replace(SCHEDULE, steps=2, measure_every=1))
    distill(wanted, Listener())
    found = [one.tokens.tolist() for one in corpus.examples_of(corpus.shards(tmp_path / "work" / "corpus"))]
    listener = Listener()
    distill(replace(wanted, tokens=10**6), listener)
    more = [one.tokens.tolist() for one in corpus.examples_of(corpus.shards(tmp_path / "work" / "corpus"))]
    assert more[: len(found)] == found
    assert len(more) == len({tuple(one) for one in more})
    assert trained_draft.is_trained_draft(tmp_path / "draft")


def test_held_out_shards_stay_held_out_as_the_corpus_grows(tmp_path):
    """Every sixteenth number, from 2 on; and a corpus without one is refused."""
    for number in range(19):
        (tmp_path / f"shard-{number:05d}.safetensors").touch()
        if number < 2:
            with pytest.raises(ConfigError, match="shards"):
                training.split(tmp_path)
        else:
            held_out = [corpus.number_of(path) for path in training.split(tmp_path)[1]]
            assert held_out == [n for n in (2, 18) if n <= number]


def test_a_moved_or_another_target_is_told(distilled, tmp_path):
    """A draft whose target is not there, or is another one, is refused with what to do."""
    weights = {"ids": torch.arange(8).int(), "readout.weight": torch.eye(64)}
    gone = trained_draft.Description(str(tmp_path / "nowhere"), (0,), "0")
    trained_draft.write(tmp_path / "gone", gone, weights)
    with pytest.raises(ConfigError, match="write its place into"):
        loading.prepare(ModelConfig(source=str(tmp_path / "gone")), print, role="draft")
    other = tiny_llama(tmp_path / "other", seed=4)
    was = trained_draft.read_description(distilled[0])
    trained_draft.write(tmp_path / "wrong", trained_draft.Description(str(other), was.layers, was.fingerprint), weights)
    with pytest.raises(ConfigError, match="was trained for another target"):
        loading.prepare(ModelConfig(source=str(tmp_path / "wrong")), print, role="draft")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "what": 2}'])
def test_a_damaged_description_is_told(tmp_path, text):
    """A ConfigError that names the file."""
    (tmp_path / trained_draft.DESCRIPTION).write_text(text)
    with pytest.raises(ConfigError, match=r"trained_draft\.json"):
        loading.prepare(ModelConfig(source=str(tmp_path)), print, role="draft")


@pytest.mark.parametrize(
    ("shape", "ids"), [((3, 64), [1, 2]), ((2, 63), [1, 2]), ((2, 64), [1, 1]), ((2, 64), [1, 99999])]
)
def test_a_head_that_does_not_fit_is_refused(tmp_path, target, shape, ids):
    """Wrong width, wrong count, ids twice or outside the vocabulary."""
    _reduced_head.write(tmp_path, torch.zeros(shape), torch.tensor(ids))
    with pytest.raises(ConfigError, match="does not fit"):
        _reduced_head.put_in_place(target, tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"tokens": 10}, {"rows": 0}, {"ids": 3}, {"schedule": Schedule(steps=0)}, {"layers": (0, 7)}]
)
def test_options_that_cannot_be_run_are_refused(options, distilled, wrong):
    """Before any work where that is possible, with the value."""
    with pytest.raises(ConfigError):
        distill(replace(options, **wrong), Listener())
