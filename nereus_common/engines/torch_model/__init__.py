"""What the torch engines share: a pipeline stage of a Hugging Face model, cut by DTensor and FSDP2, run on packs."""
