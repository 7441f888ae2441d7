"""Verify that a drafter's folder (EAGLE-3, EAGLE, DFlash, DSpark, DFlash2) is the drafter of a Megatron checkpoint.

As for models, every tensor is converted both ways and compared bit by bit, and the settings of both sides are compared.
Then both draft from the same trunk states: Megatron's modules from the checkpoint, and `Reference` from the folder, in
plain torch from its names and keys as engines read them, without the conversion rules. Its rotary angles come from
transformers.

    S = 6, K = 2    t_0 .. t_5    a drafter of one layer at every position, given the next token; a block after t_3
                    reads the trunk's states of t_0 .. t_3, begins with t_4 and drafts what follows t_4 and t_5

Letters: S positions, K drafts, R rows of a block, T positions that rows attend to, H hidden, X states of several layers
side by side, N draft vocabulary, V vocabulary, C channels of a head.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_mtp.checkpoint.convert.computation import differences
from megatron_mtp.checkpoint.convert.drafter_codec import with_inner
from megatron_mtp.checkpoint.convert.drafter_form import DrafterForm, head_key, read_drafter, stored_form, trunk_of
from megatron_mtp.checkpoint.convert.drafter_views import layer_views
from megatron_mtp.checkpoint.hf.config import CONFIG, read_json
from megatron_mtp.checkpoint.hf.folder import HFFolder, drafter_kind
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.checkpoint.verify.forms import LENGTH, prompt_of
from megatron_mtp.checkpoint.verify.prompt import Prompt, exact_float32
from megatron_mtp.checkpoint.verify.verify import Check, logits_of, round_trip
from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.megatron.patterns import symbols_of_a_layer
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.spec.kinds import DRAFTERS
from megatron_mtp.spec.registry import Imported
from megatron_mtp.spec.rope_scaling import yarn_factor

Drafts = dict[str, Tensor]
"""By name: the logits of drafts, [S, V] for a drafter with one layer or [K, V] for a block; DSpark's confidence."""


@exact_float32()
def verify_drafter(folder: Path, mcore: Path, seed: int = 0, count: str | None = None) -> list[Check]:
    """Compare a drafter's folder with the drafter of a checkpoint.

    Args:
        folder: the drafter's folder.
        mcore: the checkpoint.
        seed: seed of the tokens.
        count: what the folder's layer ids count, "outputs" or "states"; None for the meaning of their key.

    Returns:
        All checks that apply.

    Raises:
        ValueError: one of the two is damaged, or the checkpoint has no drafter.
    """
    reader = DistReader(mcore)
    if not reader.has_drafter:
        raise ValueError(f"{mcore} has no drafter to compare with {folder}; give a checkpoint that has one.")
    form, ours = read_drafter(folder, trunk_of(folder), count), stored_form(reader.common()["args"], reader)
    wrong = differences(ours.settings, form.settings)
    settings = Check.none_differs("settings that differ", wrong, "the checkpoint's arguments")
    checks = [_same_tensors(form, folder, reader), settings]
    if wrong:
        return [*checks, Check.not_made("drafts", "settings differ")]
    drafted, theirs = drafts_of_both(
        folder, mcore, form.kind.layers, prompt_of(reader, seed, LENGTH + form.kind.drafts)
    )
    witness = "plain torch; ours by Megatron"
    return [*checks, *(Check.close(name, drafted[name], value, witness) for name, value in theirs.items())]


def _same_tensors(form: DrafterForm, folder: Path, reader: DistReader) -> Check:
    """Compare all tensors both ways; a tensor that the other side lacks, or has in another shape, differs."""
    stored, rules = HFFolder(folder), form.rules(head_key(reader))
    pieces = {piece.key: piece.shape for rule in rules for piece in rule.mcore if piece.key.startswith(DRAFTER)}
    held = {key: reader.shape(key) for key in reader.keys if key.startswith(DRAFTER)}
    odd = {key for key in {*pieces, *held} if pieces.get(key) != held.get(key)}
    odd |= stored.tensors.keys() - {one.name for rule in rules for one in rule.hf}
    if odd:
        says = f"the folder itself; only one side has '{min(odd)}' in this shape"
        return Check("tensors that are equal bit by bit, there and back", 0, False, says)
    return round_trip(rules, stored, reader)


@torch.no_grad()
def drafts_of_both(folder: Path, mcore: Path, layers: Sequence[int], prompt: Prompt) -> tuple[Drafts, Drafts]:
    """Return the drafts of a checkpoint and of a folder on the checkpoint's trunk, after these layers."""
    model, reference = load_model(mcore), REFERENCES[str(drafter_kind(folder))](folder)
    states: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        return lambda _, __, made: states.update({number: (made[0] if isinstance(made, tuple) else made)[:, 0]})

    symbols = symbols_of_a_layer(getattr(model, "hybrid_layer_pattern", None))
    hooks = [model.decoder.layers[symbols * number - 1].register_forward_hook(keep(number)) for number in layers]
    steps, length = model.config.mtp_num_layers, prompt.tokens_BS.size(1)
    place = length - steps - 1  # of a block whose previous draft tokens are all in the prompt

    def ours(stage: Any) -> Drafts:
        (drafted,) = stage.drafted
        states[0] = stage.hidden_SBH[:, 0]
        head, hidden = drafted.head, stage.hidden_SBH.size(-1)
        made = torch.stack([state_SBH[place, 0] for state_SBH in drafted.hidden])
        if not reference.at_once:
            made = drafted.hidden[0][: length - 1, 0]
        logits = linear(made[:, :hidden], head.draft_weight)
        if head.bias_rows is not None:
            logits = logits + linear(made[:, hidden:], head.bias_rows)
        tokens_N = getattr(model.mtp, "draft_vocabulary", None)
        drafts = {"logits of drafts": _by_token(logits, tokens_N, reference.keys["vocab_size"])}
        if drafted.confidence_DSB is not None:
            drafts["confidence of drafts"] = drafted.confidence_DSB[:, place, 0]
        return drafts

    drafted: Drafts = logits_of(model, prompt, ours)
    for hook in hooks:
        hook.remove()
    states_SX = torch.cat([states[number] for number in layers or [0]], dim=-1)
    head, tokens_S = attached_of(model).head().weight[: reference.keys["vocab_size"]], prompt.tokens_BS[0].cuda()
    words_VH = reference.weights.get("embed_tokens.weight", model.embedding.word_embeddings.weight)
    if not reference.at_once:
        return drafted, reference.steps(states_SX[:-1], words_VH[tokens_S[1:]], head)
    return drafted, reference.drafts(states_SX[: place + 1], tokens_S, words_VH, head)


REFERENCES: "Imported[type[Reference]]" = Imported({row.name: row.reference for row in DRAFTERS.values()})
"""Reference implementations by kind."""


class Reference:
    """A drafter that runs from its folder alone, in float32.

    Attributes:
        block: rows of a block; None without blocks.
        at_once: whether it drafts K tokens in one pass.
        latents: channels of compressed keys and values; 0 for grouped-query attention.
        reads_last: whether it reads the trunk's last state, as EAGLE does, which has no norm before its output layer.
    """

    def __init__(self, folder: Path) -> None:
        keys = read_json(folder / CONFIG)
        self.keys = keys = with_inner(keys)
        files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
        tensors = {name: tensor.cuda() for file in files for name, tensor in file.items()}
        self.weights = {name: one.float() if one.is_floating_point() else one for name, one in tensors.items()}
        self.block, self.reads_last = keys.get("block_size"), "norm.weight" not in self.weights
        self.channels = keys.get("head_dim") or keys["hidden_size"] // keys["num_attention_heads"]
        self.latents: int = keys.get("kv_lora_rank") or 0
        if self.latents:
            self.channels = keys["qk_rope_head_dim"]
        row = DRAFTERS[str(drafter_kind(folder))]
        self.at_once, self.views = row.fills_blocks, layer_views(keys, row.sees_ahead)
        self.rope = rope = dict(keys.get("rope_scaling") or keys.get("rope_parameters") or {})
        theta = keys.get("rope_theta") or rope.get("rope_theta", 10000)
        config = LlamaConfig(
            hidden_size=keys["hidden_size"],
            num_attention_heads=1,
            head_dim=self.channels,
            max_position_embeddings=keys.get("max_position_embeddings") or 2048,
            rope_parameters={"rope_type": "default", **rope, "rope_theta": theta},
        )
        rotary = LlamaRotaryEmbedding(config)
        self.frequencies, self.factor = rotary.inv_freq.cuda(), rotary.attention_scaling

    def steps(self, states_SX: Tensor, next_SH: Tensor, head_VH: Tensor) -> Drafts:
        """Return the first draft of EAGLE-3 or EAGLE at every position, from the embeddings of the next tokens."""
        layer = "layers.0." if "layers.0.post_attention_layernorm.weight" in self.weights else "midlayer."
        if self.reads_last:
            residual_SH = given = self.linear("fc", torch.cat([next_SH, states_SX], dim=-1))
        else:
            residual_SH = self.linear("fc", states_SX)
            inputs = self.norm(f"{layer}input_layernorm", next_SH), self.norm(f"{layer}hidden_norm", residual_SH)
            given = torch.cat(inputs, dim=-1)
            if self.keys.get("norm_before_residual"):
                residual_SH = inputs[1]
        position_S = torch.arange(len(given), device=given.device)
        visible_SS = self.visible(0, position_S, position_S)
        state_SH = residual_SH + self.attended(f"{layer}self_attn.", given, given, position_S, visible_SS)
        state_SH = self.through_mlp(layer, state_SH)
        normed_SH = state_SH if self.reads_last else self.norm("norm", state_SH)
        return {"logits of drafts": self.logits(linear(normed_SH, self.weights.get("lm_head.weight", head_VH)))}

    def drafts(self, states_SX: Tensor, tokens_S: Tensor, words_VH: Tensor, head_VH: Tensor) -> Drafts:
        """Return the drafts after the states, each of which has its token; further tokens are those before drafts."""
        context, rows = len(states_SX), self.block or 0
        tokens_K = tokens_S[context:]
        feature_SH = self.norm("hidden_norm", self.linear("fc", states_SX))
        masks = torch.full((rows - 1,), self.keys["mask_token_id"]).to(tokens_K)
        state_RH = words_VH[torch.cat([tokens_K[:1], masks])]
        position_T = torch.arange(context + rows, device=state_RH.device)
        for number in range(self.keys["num_hidden_layers"]):
            layer = f"layers.{number}."
            normed_RH = self.norm(f"{layer}input_layernorm", state_RH)
            visible_RT = self.visible(number, position_T[context:], position_T)
            given_RH = self._convolved(f"{layer}attention_conv.", normed_RH, normed_RH, 0)
            keys_TH = torch.cat([feature_SH, given_RH])
            made_RH = self.attended(f"{layer}self_attn.", given_RH, keys_TH, position_T, visible_RT)
            state_RH = state_RH + self._convolved(f"{layer}attention_conv.", normed_RH, made_RH, 1)
            state_RH = self.through_mlp(layer, state_RH)
        state_KH = self.norm("norm", state_RH)[-len(tokens_K) :]
        logits_KN = linear(state_KH, self.weights.get("lm_head.weight", head_VH))
        return self.biased(logits_KN, state_KH, tokens_K, words_VH)

    def biased(self, logits_KN: Tensor, state_KH: Tensor, tokens_K: Tensor, words_VH: Tensor) -> Drafts:
        """Return a block's drafts from its logits, its states after the norm, and the tokens before each draft."""
        if (predecessors := self.weights.get("candidate_selector.predecessor_codebook")) is not None:
            before_KR = predecessors[tokens_K] * self.linear("candidate_selector.hidden_projection", state_KH)
            logits_KN = logits_KN + before_KR @ self.weights["candidate_selector.successor_codebook"].t()
        if (markov := self.weights.get("markov_head.markov_w1.weight")) is None:
            return {"logits of drafts": self.logits(logits_KN)}
        before_KR = markov[tokens_K]
        logits_KN = logits_KN + self.linear("markov_head.markov_w2", before_KR)
        sure_K1 = self.linear("confidence_head.proj", torch.cat([state_KH, before_KR], dim=-1))
        confidence_K = sure_K1[:, 0] + self.weights["confidence_head.proj.bias"]
        return {"logits of drafts": self.logits(logits_KN), "confidence of drafts": confidence_K}

    def visible(self, layer: int, position_R: Tensor, position_T: Tensor) -> Tensor:
        """Return which positions the rows of a layer attend to, [R, T].

        With a window, those above the row's minus its width.
        """
        view = self.views[layer]
        visible_RT = position_T > position_R[:, None] - (view.window or len(position_T))
        return visible_RT & (position_T <= position_R[:, None]) if view.causal else visible_RT

    def attended(self, place: str, rows: Tensor, attends_to: Tensor, position_T: Tensor, visible: Tensor) -> Tensor:
        """Return attention of the last rows of some positions to all of them."""
        if self.latents:
            return self._attended_by_latents(place, rows, position_T, visible)
        query, key, value = (
            self.linear(f"{place}{one}_proj", given).unflatten(-1, (-1, self.channels)).transpose(0, 1)
            for one, given in (("q", rows), ("k", attends_to), ("v", attends_to))
        )
        if f"{place}q_norm.weight" in self.weights:
            query, key = self.norm(f"{place}q_norm", query), self.norm(f"{place}k_norm", key)
        query, key = self._turned(query, position_T[-len(rows) :]), self._turned(key, position_T)
        if (sink_N := self.weights.get(f"{place}attention_sink_bias")) is None:
            made = scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
            return self.linear(f"{place}o_proj", made.transpose(0, 1).flatten(1))
        key, value = (each.repeat_interleave(len(query) // len(each), 0) for each in (key, value))
        scores_NRT = (query @ key.mT / self.channels**0.5).masked_fill(~visible, -torch.inf)
        with_sink = torch.cat([scores_NRT, sink_N[:, None, None].expand(-1, len(rows), 1)], dim=-1)
        made = with_sink.softmax(-1)[..., :-1] @ value
        return self.linear(f"{place}o_proj", made.transpose(0, 1).flatten(1))

    def _attended_by_latents(self, place: str, given: Tensor, position_T: Tensor, visible: Tensor) -> Tensor:
        """Compute latent attention of all positions; the rotary part of the keys is shared by all heads."""
        heads, content = self.keys["num_attention_heads"], self.keys["qk_nope_head_dim"]
        if f"{place}q_a_proj.weight" in self.weights:
            narrow = self.norm(f"{place}q_a_layernorm", self.linear(f"{place}q_a_proj", given))
            query = self.linear(f"{place}q_b_proj", narrow)
        else:
            query = self.linear(f"{place}q_proj", given)
        latent, shared = self.linear(f"{place}kv_a_proj_with_mqa", given).tensor_split([self.latents], dim=-1)
        wide = self.linear(f"{place}kv_b_proj", self.norm(f"{place}kv_a_layernorm", latent))
        query, wide = (one.unflatten(-1, (heads, -1)).transpose(0, 1) for one in (query, wide))
        (query, turned), (key, value) = (one.tensor_split([content], dim=-1) for one in (query, wide))
        turned, shared = (self._turned(_in_halves(one), position_T) for one in (turned, shared))
        query, key = torch.cat([query, turned], -1), torch.cat([key, shared.expand_as(turned)], -1)
        factor = yarn_factor(self.rope.get("factor") or 1, self.rope.get("mscale_all_dim") or 0)
        scale = factor**2 / query.size(-1) ** 0.5
        made = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)
        return self.linear(f"{place}o_proj", made.transpose(0, 1).flatten(1))

    def _turned(self, heads: Tensor, position_T: Tensor) -> Tensor:
        """Rotate heads [.., T, C]; each channel of the first half is paired with one of the second half."""
        angle = position_T[:, None] * self.frequencies
        cosine, sine = angle.cos() * self.factor, angle.sin() * self.factor
        front, back = heads.chunk(2, dim=-1)
        return torch.cat([front * cosine - back * sine, back * cosine + front * sine], dim=-1)

    def through_mlp(self, layer: str, state: Tensor) -> Tensor:
        """Return states after the MLP of a layer, from those after its attention."""
        normed = self.norm(f"{layer}post_attention_layernorm", state)
        given = self._convolved(f"{layer}mlp_conv.", normed, normed, 0)
        gate, up = self.linear(f"{layer}mlp.gate_proj", given), self.linear(f"{layer}mlp.up_proj", given)
        made = self.linear(f"{layer}mlp.down_proj", silu(gate) * up)
        return state + self._convolved(f"{layer}mlp_conv.", normed, made, 1)

    def _convolved(self, place: str, normed_RH: Tensor, values_RH: Tensor, side: int) -> Tensor:
        """Apply DFlash2's convolution of one block, before a part (side 0) or after it.

        Return values unchanged without one.
        """
        if (base := self.weights.get(f"{place}base_kernel")) is None:
            return values_RH
        taps, groups = base.size(1), base.size(2) // self.keys["conv_group_size"]
        added = self.linear(f"{place}kernel_projection", normed_RH).view(len(normed_RH), 2, taps, groups)
        kernel_RTH = base[side] + added[:, side].repeat_interleave(self.keys["conv_group_size"], dim=-1)
        made_RH = torch.zeros_like(values_RH)
        for row in range(len(values_RH)):
            for tap in range(min(taps, row + 1)):
                made_RH[row] += kernel_RTH[row, tap] * values_RH[row - tap]
        return made_RH

    def logits(self, logits: Tensor) -> Tensor:
        """Return logits of the draft vocabulary at their ids."""
        offsets = self.weights.get("d2t")
        tokens_N = None if offsets is None else offsets + torch.arange(len(offsets)).to(offsets)
        return _by_token(logits, tokens_N, self.keys["vocab_size"])

    def norm(self, name: str, value: Tensor) -> Tensor:
        """Apply the norm with this name."""
        weight = self.weights[f"{name}.weight"]
        return rms_norm(value, weight.shape, weight, self.keys.get("rms_norm_eps", 1e-6))

    def linear(self, name: str, value: Tensor) -> Tensor:
        """Multiply by the weight with this name."""
        return linear(value, self.weights[f"{name}.weight"])


def _in_halves(heads: Tensor) -> Tensor:
    """Reorder channels [.., C] that are rotated in pairs, 0 with 1, 2 with 3, into halves."""
    return heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _by_token(logits: Tensor, tokens_N: Tensor | None, vocabulary: int) -> Tensor:
    """Return logits [.., V] of drafted tokens at their ids, zeros for others; without ids all tokens are drafted."""
    if tokens_N is None:
        return logits[:, :vocabulary]
    return logits.new_zeros(len(logits), vocabulary).index_copy_(-1, tokens_N.to(logits.device), logits)
