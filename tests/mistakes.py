"""Settings that cannot work and what the answer has to say: one list for Python, the command line, files and Flower."""

import math

import torch

WHOLE = "; expected a whole number, 1 or more"
SHARE = "; expected a number above 0 and at most 1."
RATE = "; expected a number above 0 and at most 3.40282e+38."
ROWS = "; expected a whole number, 1 or more, and 2.14748e+09 or less."
SEED = "; expected a whole number, 0 or more, below 2^63."
WAYS = "one of: auto, loop, recomputed, stacked, unfold, vmap."
STEPS = "; expected a list of numbers of steps, such as (20,)."
FLOATS = "; expected a floating-point type of torch's, such as torch.float32."
DECAY = "; expected a number 0 or more and at most 3.40282e+38."
LENGTH = "; expected a number above 0 and at most 3.40282e+38, or none."
SCHEDULE = "expected 'constant', 'cosine', 'exponential 0.99' (times that after each round) or 'step 0.1 0.5 0.75'"
IMAGES = "expected 'none', 'crop', 'flip' or 'crop flip'."
BOTH = "; expected True or False."

# Name, value, and what is said of it wherever it can be given.
SETTINGS = [
    ("rounds", 0, f"rounds is 0{WHOLE}"),
    ("rounds", -1, f"rounds is -1{WHOLE}"),
    ("rounds", 2.5, f"rounds is 2.5{WHOLE}"),
    ("rounds", "ten", f"rounds is 'ten'{WHOLE}"),
    ("participation", 0.0, f"participation is 0.0{SHARE}"),
    ("participation", -0.1, f"participation is -0.1{SHARE}"),
    ("participation", 1.0001, f"participation is 1.0001{SHARE}"),
    ("participation", 2, f"participation is 2{SHARE}"),
    ("participation", math.nan, f"participation is nan{SHARE}"),
    ("participation", "some", f"participation is 'some'{SHARE}"),
    ("participation", 10**400, f"participation is a whole number of 1329 bits{SHARE}"),
    ("learning_rate", 0.0, f"learning_rate is 0.0{RATE}"),
    ("learning_rate", -1, f"learning_rate is -1{RATE}"),
    ("learning_rate", math.nan, f"learning_rate is nan{RATE}"),
    ("learning_rate", "fast", f"learning_rate is 'fast'{RATE}"),
    ("learning_rate", 1e300, f"learning_rate is 1e+300{RATE}"),
    ("learning_rate", 10**39, f"learning_rate is 1{39 * '0'}{RATE}"),
    ("learning_rate", 10**400, f"learning_rate is a whole number of 1329 bits{RATE}"),
    ("batch_size", 0, f"batch_size is 0{ROWS}"),
    ("batch_size", 2.5, f"batch_size is 2.5{ROWS}"),
    ("batch_size", "x", f"batch_size is 'x'{ROWS}"),
    ("batch_size", 1 << 31, f"batch_size is 2147483648{ROWS}"),
    ("batch_size", 10**30, f"batch_size is 1{30 * '0'}{ROWS}"),
    ("seed", -1, f"seed is -1{SEED}"),
    ("seed", "one", f"seed is 'one'{SEED}"),
    ("seed", 10**30, f"seed is 1{30 * '0'}{SEED}"),
    ("device", "warp", "device is 'warp'; expected 'cpu', 'cuda' or another of torch's."),
    ("device", "meta", "device is 'meta', which cannot be used here"),
    ("device", 3.0, "device is 3.0; expected 'cpu', 'cuda' or another of torch's."),
    ("robust", "krum", "robust is 'krum'; expected 'none' or 'clip' or 'median' or 'trimmed' or 'hierarchy'."),
    ("clip", 0, "clip is 0; expected a number above 0 and at most 3.40282e+38, or none."),
    ("max_weight", 1.0, "max_weight is 1 without clip; expected clip, too"),
    ("noise_multiplier", 2.0, "noise_multiplier is 2 without clip; expected clip, too"),
    ("noise_multiplier", -1.0, "noise_multiplier is -1.0; expected a number 0 or more"),
    ("row_clip", 0, f"row_clip is 0{LENGTH}"),
    ("row_noise_multiplier", 2.0, "row_noise_multiplier is 2 without row_clip; expected row_clip, too"),
    ("row_noise_multiplier", -1.0, "row_noise_multiplier is -1.0; expected a number 0 or more"),
    ("evaluate_every", -1, "evaluate_every is -1; expected a whole number, 0 or more."),
    ("evaluate_on", "tset", "evaluate_on is 'tset'; expected 'test' or 'validation'."),
    ("evaluate_on", "validation", "no validation rows"),
    ("evaluate_train", "yes", f"evaluate_train is 'yes'{BOTH}"),
    ("evaluate_validation", "yes", f"evaluate_validation is 'yes'{BOTH}"),
    ("evaluate_validation", True, "no validation rows"),
    ("fine_tune", 5, f"fine_tune is 5{STEPS}"),
    ("fine_tune", "20", f"fine_tune is '20'{STEPS}"),
    ("fine_tune", (0,), f"fine_tune is 0{WHOLE}"),
    ("class_frequencies", 1, f"class_frequencies is 1{BOTH}"),
    ("neighbours", 0, f"neighbours is 0{WHOLE}"),
    ("checkpoint_every", 0.5, "checkpoint_every is 0.5; expected a whole number, 0 or more."),
    ("chunk_size", 0, f"chunk_size is 0{WHOLE}"),
    ("gradients", "vmpa", f"unknown gradients 'vmpa'; did you mean 'vmap'? Expected {WAYS}"),
    ("gradients", 3, f"unknown gradients 3; expected {WAYS}"),
    ("dtype", "int64", f"dtype is 'int64'{FLOATS}"),
    ("dtype", "float7", f"dtype is 'float7'{FLOATS}"),
    ("dtype", torch.int32, f"dtype is torch.int32{FLOATS}"),
    ("precision", "half", "precision is 'half'; expected 'full' or 'bfloat16'."),
    ("precision", 16, "precision is 16; expected 'full' or 'bfloat16'."),
    ("optimiser", "adm", "unknown optimiser 'adm'; did you mean 'adam'? Expected one of: adam, momentum, sgd."),
    ("optimiser", 3, "optimiser is 3; expected 'sgd', 'momentum', 'adam', or one with options"),
    ("learning_rate_schedule", "cosin", f"learning_rate_schedule is 'cosin'; {SCHEDULE}"),
    ("learning_rate_schedule", "", f"learning_rate_schedule is ''; {SCHEDULE}"),
    ("learning_rate_schedule", 0.9, f"learning_rate_schedule is 0.9; {SCHEDULE}"),
    ("learning_rate_schedule", "cosine 0.5", f"learning_rate_schedule is 'cosine 0.5'; {SCHEDULE}"),
    ("learning_rate_schedule", "exponential 1.1", f"learning_rate_schedule is 'exponential 1.1'; {SCHEDULE}"),
    ("learning_rate_schedule", "exponential 0.9 0.8", f"learning_rate_schedule is 'exponential 0.9 0.8'; {SCHEDULE}"),
    ("learning_rate_schedule", "step 0.1", f"learning_rate_schedule is 'step 0.1'; {SCHEDULE}"),
    ("learning_rate_schedule", "step 0.1 0.5 0.5", f"learning_rate_schedule is 'step 0.1 0.5 0.5'; {SCHEDULE}"),
    ("learning_rate_schedule", "step 0.1 50 75", f"learning_rate_schedule is 'step 0.1 50 75'; {SCHEDULE}"),
    ("learning_rate_schedule", "step nan 0.5", f"learning_rate_schedule is 'step nan 0.5'; {SCHEDULE}"),
    ("keep_optimiser", 1, f"keep_optimiser is 1{BOTH}"),
    ("keep_optimiser", "yes", f"keep_optimiser is 'yes'{BOTH}"),
    (
        "keep_optimiser",
        True,
        "keep_optimiser is True, and 'sgd' remembers nothing of earlier steps; expected opt",
    ),
    ("weight_decay", -0.1, f"weight_decay is -0.1{DECAY}"),
    ("weight_decay", math.nan, f"weight_decay is nan{DECAY}"),
    ("weight_decay", "some", f"weight_decay is 'some'{DECAY}"),
    ("weight_decay", 1e300, f"weight_decay is 1e+300{DECAY}"),
    ("max_gradient_norm", 0, f"max_gradient_norm is 0{LENGTH}"),
    ("max_gradient_norm", -1.0, f"max_gradient_norm is -1.0{LENGTH}"),
    ("max_gradient_norm", "long", f"max_gradient_norm is 'long'{LENGTH}"),
    ("augmentation", "", f"augmentation is ''; {IMAGES}"),
    ("augmentation", "corp", f"augmentation is 'corp'; {IMAGES}"),
    ("augmentation", "crop none", f"augmentation is 'crop none'; {IMAGES}"),
    ("augmentation", "flip flip", f"augmentation is 'flip flip'; {IMAGES}"),
    ("augmentation", True, f"augmentation is True; {IMAGES}"),
    ("gain", 1, f"gain is 1{BOTH}"),
    ("engine", "steam", "engine is 'steam'; expected 'cohort' or 'serial'."),
]
