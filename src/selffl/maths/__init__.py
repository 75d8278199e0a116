"""The equations: tensors in, tensors out.  No seeds, no devices, no disk."""
