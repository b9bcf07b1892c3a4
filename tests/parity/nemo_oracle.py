"""NeMo-AutoModel's V4.1 as an oracle: a small model with random weights that hide nothing. Shared by the parity tests."""

import json
import math

import torch
from tokenizers import Tokenizer

from headrace.engine.make_checkpoint import config_json, small_tokenizer_json

VISION = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_image_tokens": 64,
}


def build_oracle(text):
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41 import attention
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
    from transformers import PreTrainedTokenizerFast

    attention.quantize_cache = lambda values, **_: values
    tokenizer = Tokenizer.from_str(json.dumps(small_tokenizer_json()))
    data = config_json(text, tokenizer) | {"vision_config": VISION}
    del data["quantization_config"]  # plain weights
    config = DeepseekV41Config(**{key: value for key, value in data.items() if key != "model_type"})
    backend = BackendConfig(
        attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch", rope_fusion=False,
        gate_precision="float32", enable_hf_state_dict_adapter=True,
    )  # fmt: skip
    model = DeepseekV41ForCausalLM(
        config, backend=backend, tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    )
    model.initialize_weights(dtype=torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            if not value.is_floating_point() or value.numel() == 1:
                continue
            if value.std() == 0:  # norms, sinks, biases, bases, scales
                value.add_(0.3 * torch.randn_like(value))
            else:
                value.normal_(0, 1 / math.sqrt(value.shape[-1]))
    return model.eval(), data
