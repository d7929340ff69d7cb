"""Draft heads as students: what they learn is what is served."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import islice

import pytest
import torch
from heads_reference import Reference
from listening import Listener
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama

from specserve.config import ModelConfig
from specserve.distill import checkpoints, corpus, training
from specserve.distill.heads import HeadStudent
from specserve.distill.optimiser import InputScaledAdamW
from specserve.distill.run import KINDS, Options, distill
from specserve.distill.students import Origin
from specserve.distill.training import Head, Schedule
from specserve.errors import ConfigError
from specserve.local import LocalEngine
from specserve.models import loading
from specserve.types import Request, RequestId, Sampling

IDS, LAYERS, DEPTH = 200, 4, 3
READ = {"eagle": (), "eagle3": (1, 2, 3)}
SCHEDULE = Schedule(steps=40, batch_tokens=1024, learning_rate=3e-3, warm_up=5, measure_every=20, depth=DEPTH, seed=1)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECSERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"), seed=3, layers=LAYERS)


@pytest.fixture(scope="module")
def target(target_folder):
    return loading.load_model(target_folder, ModelConfig(source=str(target_folder), device="cpu"))


@pytest.fixture(scope="module")
def written(tmp_path_factory, target_folder):
    """Options of a run of either kind, whose corpora are one."""
    base = tmp_path_factory.mktemp("distilled")
    found = {}
    for kind, read in READ.items():
        found[kind] = Options(
            target=str(target_folder),
            out=base / kind,
            work=base / f"{kind}.work",
            tokens=8_000,
            rows=24,
            kind=kind,
            layers=read,
            ids=IDS,
            device="cpu",
            schedule=SCHEDULE,
        )
    return found


@pytest.fixture(scope="module")
def distilled(written):
    """The same options, once both have run."""
    distill(written["eagle"], Listener())
    shutil.copytree(written["eagle"].work / "corpus", written["eagle3"].work / "corpus")
    distill(written["eagle3"], Listener())
    return written


@pytest.fixture(params=READ)
def kind(request):
    return request.param


def shaken(student, seed=5):
    """The student with other weights than it begins with, so that every part of it matters."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in student.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=noise))
    return student


def test_what_is_trained_is_what_a_head_computes_when_it_drafts(target_folder, target, tmp_path, kind):
    """At every place and drafted token, the student's states are those of a plain head that reads its own states."""
    student = shaken(HeadStudent(target, READ[kind]))
    narrow = {name: weight.half() for name, weight in student.state_dict().items()}
    student.load_state_dict(narrow)
    student.write(tmp_path, narrow, torch.arange(IDS), Origin(str(target_folder), 1))
    reference = Reference(target_folder, tmp_path, third=kind == "eagle3")
    rows = [list(range(40, 52)), list(range(90, 102))]
    with torch.no_grad():
        hidden = target.model(torch.tensor(rows)).last_hidden_state
        steps = list(student.unrolled(torch.tensor(rows), hidden, 4))
    assert [states.shape[1] for states in steps] == [11, 10, 9, 8]
    for row, tokens in enumerate(rows):
        shown = reference.read_target(tokens)[1]
        for base in range(1, 9):
            for step, state in enumerate(reference.chain(tokens, shown, base, 4)):
                torch.testing.assert_close(steps[step][row, base - 1], reference.normed(state), atol=2e-3, rtol=1e-3)


def test_padding_changes_nothing_that_is_taught(target, kind):
    """A row's states are the same beside a longer one."""
    student = shaken(HeadStudent(target, READ[kind]))
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10, 0, 0], [20, 21, 22, 23, 24, 25, 26, 27]])
    with torch.no_grad():
        hidden = target.model(tokens).last_hidden_state
        both = list(student.unrolled(tokens, hidden, 3))
        alone = list(student.unrolled(tokens[:1, :6], hidden[:1, :6], 3))
    for wide, narrow in zip(both, alone, strict=True):
        torch.testing.assert_close(wide[:1, : narrow.shape[1]], narrow, atol=1e-5, rtol=1e-4)


def measured(student, target, options):
    ids = load_file(options.work / "run" / "ids.safetensors")["ids"]
    held_out = training.split(options.work / "corpus")[1]
    return training.evaluate(student, Head(target.lm_head.weight, ids, torch.float32), held_out, DEPTH, 100)


def test_a_trained_head_drafts_much_better_than_a_random_one(distilled, target, kind):
    """On held-out answers: more tokens per round, and more kept of a chain's second token, which own states decide."""
    options, student = distilled[kind], HeadStudent(target, READ[kind])
    random = measured(shaken(student), target, options)
    student.load_state_dict(checkpoints.load_best(options.work / "run"))
    trained = measured(student, target, options)
    assert trained.tokens_per_round > random.tokens_per_round + 0.15
    assert trained.kept_at[1] > 3 * random.kept_at[1] + 5
    assert trained.overlap > random.overlap + 0.05


def test_only_what_was_trained_is_written_in_the_published_layout(distilled, target, kind):
    """One layer, fc, norm where there is one, and the id map by frequency; no embedding and no head."""
    options = distilled[kind]
    weights = load_file(options.out / "model.safetensors")
    third = kind == "eagle3"
    layer = "midlayer." if third else "layers.0."
    assert weights["fc.weight"].shape == (64, 64 * (3 if third else 2))
    assert weights[f"{layer}self_attn.q_proj.weight"].shape == (64, 128 if third else 64)
    assert ("norm.weight" in weights, f"{layer}hidden_norm.weight" in weights) == (third, third)
    assert f"{layer}input_layernorm.weight" in weights or not third
    assert not {"lm_head.weight", "embed_tokens.weight"} & set(weights)
    ids = torch.arange(IDS) + weights["d2t"]
    learned = corpus.examples_of(training.split(options.work / "corpus")[0])
    counts = torch.bincount(torch.cat([one.tokens[one.start :] for one in learned]), minlength=len(weights["t2d"]))
    assert counts[ids].min() >= counts[~weights["t2d"]].max()
    assert weights["t2d"].nonzero().squeeze(1).tolist() == ids.tolist()
    told = json.loads((options.out / "config.json").read_text())
    assert told.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", []) == list(READ[kind])


def test_serving_takes_the_folder_and_keeps_the_targets_answers(distilled, target_folder, target, tmp_path, kind):
    """Greedy answers are those without a draft, and far more is kept than of a random head."""
    options = distilled[kind]
    ids = load_file(options.work / "run" / "ids.safetensors")["ids"]
    student = shaken(HeadStudent(target, READ[kind]))
    student.write(tmp_path / "random", student.state_dict(), ids, Origin(str(target_folder), 1))
    held_out = training.split(options.work / "corpus")[1]
    prompts = [one.tokens[: one.answer].tolist() for one in islice(corpus.examples_of(held_out), 6)]
    requests = [
        Request(RequestId(f"r{i}"), tuple(prompt), 32, Sampling(0.0), ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    tree = {"target": {"source": str(target_folder), "kv_memory_gib": 0.1}}
    with LocalEngine(tree | {"engine": {"depth": 0, "max_requests": 4}}) as engine:
        plain = engine.complete(requests)
    kept = []
    for head in (options.out, tmp_path / "random"):
        draft = {"speculator": "eagle", "model": {"source": str(head), "kv_memory_gib": 0.1}}
        with LocalEngine(tree | {"draft": draft, "engine": {"depth": DEPTH, "max_requests": 4}}) as engine:
            done = engine.complete(requests)
        assert [one.tokens for one in done] == [one.tokens for one in plain]
        kept.append(sum(one.stats.kept_tokens for one in done))
    assert kept[0] > 3 * kept[1] + 10


def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(distilled, target, tmp_path, kind):
    """Stopped at its second measure and called again, it ends with the same weights, bit by bit."""
    texts, results = distilled[kind].work / "corpus", []
    head = Head(target.lm_head.weight, torch.arange(IDS), torch.float32)
    schedule = replace(SCHEDULE, steps=6, measure_every=3)
    for name, patience in (("whole", math.inf), ("cut", 1)):
        folder = tmp_path / name
        folder.mkdir()
        torch.manual_seed(7)
        student = HeadStudent(target, READ[kind])
        try:
            training.train(student, head, texts, folder, schedule, Listener(patience))
        except KeyboardInterrupt:
            again = HeadStudent(target, READ[kind])
            assert checkpoints.load_run(folder, again, InputScaledAdamW(again, weight_decay=0.0))[0] == 3
            training.train(HeadStudent(target, READ[kind]), head, texts, folder, schedule, Listener())
        results.append(checkpoints.load_best(folder))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_unrolling_makes_later_places_hold_up(distilled, target, tmp_path):
    """On held-out text, a head that was taught three drafted places is nearer to the target at the third than one that
    was taught the first only."""
    options, losses = distilled["eagle"], []
    first_only = replace(
        options, out=tmp_path / "draft", work=tmp_path / "work", schedule=replace(SCHEDULE, unrolled=1)
    )
    shutil.copytree(options.work / "corpus", first_only.work / "corpus")
    distill(first_only, Listener())
    batch = training.batch_of(corpus.read_shard(training.split(options.work / "corpus")[1][0])[:32], 0.0)
    third = replace(SCHEDULE, later_share=1e3)  # the third place has nearly all of the weight
    for run in (first_only, options):
        student = HeadStudent(target)
        student.load_state_dict(checkpoints.load_best(run.work / "run"))
        ids = load_file(run.work / "run" / "ids.safetensors")["ids"]
        with torch.no_grad():
            losses.append(
                float(training.loss_of(student, Head(target.lm_head.weight, ids, torch.float32), batch, third))
            )
    assert losses[1] < losses[0]


def test_training_begins_at_a_trained_head(distilled, written, tmp_path, kind):
    """With a rate of next to nothing the head that is written is the one that was begun at, vocabulary included."""
    options, listener = distilled[kind], Listener()
    schedule = replace(SCHEDULE, steps=1, learning_rate=1e-9)
    again = replace(options, out=tmp_path / "draft", work=tmp_path / "work", start=options.out, ids=64)
    shutil.copytree(options.work / "corpus", again.work / "corpus")
    distill(replace(again, schedule=schedule), listener)
    was, now = (load_file(folder / "model.safetensors") for folder in (options.out, again.out))
    assert was.keys() == now.keys()
    assert all(torch.equal(was[name], now[name]) for name in was)
    assert not any("closed form" in line for line in listener.lines)


def test_a_head_that_training_cannot_begin_at_is_refused(distilled, written, tmp_path, target):
    """Of the other kind, of another target, without a vocabulary, no head at all, or beside a run with other ids."""
    eagle, eagle3 = distilled["eagle"].out, distilled["eagle3"].out
    with pytest.raises(ConfigError, match=r"its fc\.weight is \[64, 192\].*has \[64, 128\]"):
        HeadStudent(target).begin_at(eagle3)
    with pytest.raises(ConfigError, match=r"midlayer|layers\.0"):
        HeadStudent(target, (1, 2)).begin_at(eagle)
    with pytest.raises(ConfigError, match="holds no EAGLE head"):
        HeadStudent(target).begin_at(tmp_path)
    weights, told = load_file(eagle / "model.safetensors"), json.loads((eagle / "config.json").read_text())
    save_file({name: weight for name, weight in weights.items() if name != "d2t"}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="no d2t"):
        HeadStudent(target).begin_at(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(told | {"target_fingerprint": "0"}))
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="trained for another target"):
        HeadStudent(target).begin_at(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(told))
    moved = weights["d2t"].clone()
    moved[-1] += 1
    save_file(weights | {"d2t": moved}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="other ids"):
        distill(replace(distilled["eagle"], start=tmp_path), Listener())


def test_a_head_is_refused_for_another_target_of_the_same_sizes(distilled, tmp_path, kind):
    """The folder knows the embedding that it was trained with."""
    other = tiny_llama(tmp_path, seed=4, layers=LAYERS)
    with pytest.raises(ConfigError, match="trained for another target"):
        loading.prepare(ModelConfig(source=str(distilled[kind].out), target=str(other)), print, role="draft")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "medusa"}, "small, eagle, eagle3"),
        ({"kind": "eagle", "layers": (1,)}, "eagle3"),
        ({"schedule": Schedule(unrolled=0)}, "unrolled"),
    ],
)
def test_options_that_cannot_be_run_are_refused(written, wrong, said):
    """Before any work, with what there is."""
    with pytest.raises(ConfigError, match=said):
        distill(replace(written["eagle"], **wrong), Listener())


def test_a_target_that_has_no_head_of_its_kind_is_refused(target):
    """Layers that there are not, and an embedding that is more than a look-up."""
    with pytest.raises(ConfigError, match="layers \\[1, 9\\]"):
        KINDS["eagle3"](target, (1, 9))
    scaled = type("Scaled", (torch.nn.Embedding,), {})(8, 64)
    plain, target.model.embed_tokens = target.model.embed_tokens, scaled
    try:
        with pytest.raises(ConfigError, match="embedding"):
            KINDS["eagle"](target, ())
    finally:
        target.model.embed_tokens = plain
