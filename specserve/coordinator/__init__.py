"""The mind of a pipeline: plain Python, no torch, no ray, no HTTP.

`engine` owns every request and is driven by one thread (`loop`). The pools (`slots`, `blocks`), the `branches` of a
plan, the `scheduler` and the `endings` are parts that know nothing of each other's callers and are tested alone.
"""
