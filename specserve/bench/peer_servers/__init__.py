"""Other engines beside ours, ONE FILE PER PEER: how its environment is had, its model made, and its server started.

Such a file is read on both sides. specserve imports it for what it says of itself, and the peer's own Python, where
neither specserve nor its other files are to be had, runs it through `_launch.py`. So it imports nothing but the
standard library outside of its functions. It says:

- `DISTRIBUTION`: the package whose version is its own.
- `REQUIREMENTS`: what pip installs into its environment; none where specserve's own will do.
- `UNWANTED`: packages that come along and break others, taken out again.
- `MODES`: of "plain", "draft" (with a draft model) and "ngram" (prompt lookup), those that it has.
- `export(source, to)`, where it cannot read a folder of safetensors: makes its own form of one, in float32.
- one of: `serve(asked)`, its own server until it is ended; `engine(asked)`, an object with `add(key, prompt,
  max_tokens)` and `step()`, which returns the (key, tokens) that are finished; `generate(asked)`, a function from
  prompts and max_tokens to answers. The latter two get a small server of the standard library in front.

Every one computes in float32 and greedily, goes on behind an end token, and keeps no prompt for later.
"""

NOT_CHOICES: frozenset[str] = frozenset()
