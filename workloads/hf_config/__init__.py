"""Models from Hugging Face's configuration files: translation of a `config.json` to a family and its shape.

    translate({"model_type": "qwen3", "hidden_size": 4096, ...})  ->  Translation("decoder", {"d_model": ...})

Each `model_type` has a function that reads the keys it knows, with that model's defaults for missing keys.
All other keys must be known not to affect the model, or be off (null or false). Otherwise an error names the
key.
"""

from fsdpbench.workloads.hf_config.model_types import MODEL_TYPES, Translation, translate
