"""Run in an environment with `lm-eval[api]`: folder, tokenizer and urls in; answers and log-likelihoods by url out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

FOLDER, TOKENIZER, *URLS = sys.argv[1:]
ROWS = [("The quick", " brown fox"), ("over the", " lazy dog"), ("stop STOP", " END"), ("def f(x):", " return x")]
COMMON = (
    "dataset_path: json\ndataset_kwargs: {data_files: {test: DATA}}\ntest_split: test\ndoc_to_text: '{{question}}'\n"
)
CHOICE = (
    COMMON
    + "task: tiny_choice\noutput_type: multiple_choice\ndoc_to_target: 0\n"
    + "doc_to_choice: ['{{answer}}', ' zebra', ' 0123']\n"
)
WRITE = COMMON + (
    "task: tiny_write\noutput_type: generate_until\ndoc_to_target: '{{answer}}'\n"
    "generation_kwargs: {until: ['###'], max_gen_toks: 24, do_sample: false, temperature: 0}\n"
    "metric_list: [{metric: exact_match}]\n"
)

data = Path(FOLDER) / "data.json"
data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in ROWS))
for name, text in (("choice", CHOICE), ("write", WRITE)):
    (Path(FOLDER) / f"{name}.yaml").write_text(text.replace("DATA", str(data)))

seen = {}
for url in URLS:
    model = (
        f"model=tiny,base_url={url}/v1/completions,tokenizer={TOKENIZER},num_concurrent=2,max_length=512,max_retries=1"
    )
    done = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=model,
        tasks=["tiny_choice", "tiny_write"],
        task_manager=TaskManager(include_path=FOLDER, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = done["samples"]
    seen[url] = {
        "likelihoods": [[float(each[0]) for each in sample["filtered_resps"]] for sample in samples["tiny_choice"]],
        "texts": [sample["resps"][0][0] for sample in samples["tiny_write"]],
    }
print(json.dumps(seen))
