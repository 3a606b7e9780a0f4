"""Generation engines: one unit samples rollouts, and takes new weights while it lives.

base.py                  the interface and its values
options.py               what a job may set about an engine
support.py               which plans an engine can run (pure)
host.py, gate.py         the worker body: admission, versions, pieces; whatever the engine
crossing.py              a request that new weights interrupt, and that goes on under them
continuation.py          one sample of it (pure)
vllm_engine.py           vLLM, as the frontend process sees it; vllm_arguments.py: plan → vLLM's arguments
vllm_plugin.py           runs in every vLLM process; guards.py: none of them outlives its owner
vllm_transfer.py         runs in every vLLM rank: pull into staging.py, load, read back (installed.py, readback.py)
scratch.py               an engine's temporary folder, swept when its owner is gone
transformers_engine.py   one process, Hugging Face modules: for fast tests
"""
