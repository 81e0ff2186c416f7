"""Models as Hugging Face's configuration files describe them: `config.json` to a family and its shape.

    translate({"model_type": "qwen3", "hidden_size": 4096, ...})  ->  Translation("decoder", {"d_model": ...})

Each `model_type` has a function that reads the keys it knows, with that model's own defaults for those left
out. What is left over must be known to be without effect on the model, or be off (null or false): anything
else is refused by name.
"""

from fsdpbench.workloads.hf_config.model_types import MODEL_TYPES, Translation, translate
