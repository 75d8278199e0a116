"""Adapters: small changes of a large, frozen module, which clients train and send in its place."""

from selffl.adapters.build import bias_only, lora, merge, prefix, train_only
from selffl.adapters.peft import from_peft, save_peft

__all__ = ["bias_only", "from_peft", "lora", "merge", "prefix", "save_peft", "train_only"]
