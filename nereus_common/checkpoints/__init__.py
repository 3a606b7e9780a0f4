"""Checkpoints as files: what is in the folder, how it becomes complete, how any layout reads it. `docs/checkpoints.md`
describes the format. Pure but for files: numpy and safetensors, no torch, no clock, no event loop."""
