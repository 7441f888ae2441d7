"""Names and shapes of the tensors that transformers' class would save for a folder: it is built without memory.

Trunks that Megatron cannot run are carried by name, and no rule says which tensors they have; their class does.
"""

from pathlib import Path

Shape = tuple[int, ...]


def class_tensors(folder: Path) -> dict[str, Shape]:
    """The tensors that `save_pretrained` would write, by name; empty if transformers has no class for the config.

    Args:
        folder: a folder with a `config.json`; its tensors are not read, and no code of it is run.
    """
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.__dict__.pop("quantization_config", None)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
        found = revert_weight_conversion(model, model.state_dict())
    except Exception:  # transformers raises many kinds of errors for a config that it does not know
        return {}
    return {name: tuple(tensor.shape) for name, tensor in found.items()}
