"""A target whose next token is a function of the last one, and heads that know that function.

The target's hidden states are one-hot in its last token. Heads either read the token (an off-by-one there is a wrong draft) or
the features (an off-by-one there is one).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specheads.heads import EagleHead, MedusaHeads
from tests.tiny import tiny

SIZE = 32
CYCLE = [3, 17, 5, 30, 8, 21, 12]
STRONG = 1000.0


def successor(power: int = 1) -> Tensor:
    """`[V, V]` the matrix that takes a one-hot token to the one-hot token `power` later."""
    following = {token: CYCLE[(index + power) % len(CYCLE)] for index, token in enumerate(CYCLE)}
    matrix = torch.zeros(SIZE, SIZE, dtype=torch.double)
    for token in range(SIZE):
        matrix[following.get(token, token), token] = 1
    return matrix


@torch.no_grad()
def cyclic_target(family: str = "llama") -> PreTrainedModel:
    width = {"gpt2": "n_embd", "t5": "d_model", "bart": "d_model"}.get(family, "hidden_size")
    target = tiny(family, vocab_size=SIZE, tie_word_embeddings=False, **{width: SIZE}, eos_token_id=None)
    if hasattr(target, "set_experts_implementation"):
        target.set_experts_implementation("eager")
    for parameter in target.parameters():
        if parameter.dim() > 1:
            parameter.zero_()  # layers add nothing to the residual stream
    target.get_input_embeddings().weight.copy_(torch.eye(SIZE))
    if target.config.is_encoder_decoder:  # some tie their tables whatever the config says, some have a second one
        target.set_output_embeddings(torch.nn.Linear(SIZE, SIZE, bias=False).double())
        target.get_decoder().embed_tokens.weight.copy_(torch.eye(SIZE))
    target.get_output_embeddings().weight.copy_(successor())
    return target


@torch.no_grad()
def perfect_medusa(target: PreTrainedModel, late: int = 0, **fields) -> MedusaHeads:
    """Heads that predict every token; with `late`, always the token that many later, which is wrong."""
    heads = MedusaHeads.from_target(target, **fields)
    for index, output in enumerate(heads.lm_heads):
        rows = successor(index + 2 + late)
        output.weight.copy_(rows if heads.draft_ids is None else rows[heads.draft_ids])
    return heads


@torch.no_grad()
def perfect_eagle(target: PreTrainedModel, version: int = 3, reads: str = "features", late: int = 0, **fields) -> EagleHead:
    """A head that predicts every token; with `late`, the first one that many later, which is wrong.

    Args:
        target: A `cyclic_target`.
        version: 1, 2 or 3.
        reads: `"features"`: it drafts from the target's hidden states alone, its own being those of one token later;
            `"tokens"`: it drafts from the token alone, for version 3 the first draft only.
        late: How many tokens later.
        fields: Arguments of `EagleHead.from_target`.
    """
    head = EagleHead.from_target(target, version=version, **fields)
    for parameter in head.layers.parameters():
        if parameter.dim() > 1:
            parameter.zero_()
    head.fc.weight.zero_()
    if version == 3:
        rows = successor()
        head.lm_head.weight.copy_(rows if head.draft_ids is None else rows[head.draft_ids])
    if reads == "features":
        _read_features(head, version, late)
    else:
        _read_tokens(head, version, late)
    return head


def _read_features(head: EagleHead, version: int, late: int) -> None:
    eye = torch.eye(SIZE, dtype=torch.double)
    # The last feature layer for version 3, the hidden state beside the embedding for the others.
    head.fc.weight[:, -SIZE:] = eye
    if version == 3:
        # Features are one-hot of some length; fused ones shall have that of a normalised one-hot vector.
        code = torch.zeros(1, 1, head.config.feature_size, dtype=torch.double)
        code[..., ::SIZE] = 1
        head.fc.weight *= SIZE**0.5 / head.fuse(code)[0, 0, 0]
    # A normalised one-hot vector has this length; the layer takes it off the residual stream and puts the next one there.
    length = torch.tensor(SIZE**0.5, dtype=torch.double)
    mlp = head.layers[0].mlp
    mlp.gate_proj.weight[:SIZE] = eye
    mlp.up_proj.weight[:SIZE] = eye
    step = length / (torch.nn.functional.silu(length) * length)
    mlp.down_proj.weight[:, :SIZE] = step * (successor(1 + late) - eye)


def _read_tokens(head: EagleHead, version: int, late: int) -> None:
    if version != 3:
        head.fc.weight[:, :SIZE] = successor(late)
        return
    attention = head.layers[0].self_attn
    heads = attention.o_proj.weight.shape[1] // attention.head_dim
    for index in range(heads):
        # Each head carries its share of the token's one-hot code. All queries and keys are zero: attention is an average
        # over the text, which must be one token.
        own = slice(index * attention.head_dim, (index + 1) * attention.head_dim)
        attention.o_proj.weight[own, own] = STRONG * torch.eye(attention.head_dim)
    attention.v_proj.weight[:, :SIZE] = successor(late)


@torch.no_grad()
def continuation(target: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = target.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return ids[0, len(prompt) :].tolist()


@torch.no_grad()
def features_of(model: PreTrainedModel, ids: Tensor, layers: list[int], **arguments) -> Tensor:
    """`[B, N, L t]` hidden states side by side."""
    states = model(ids, output_hidden_states=True, **arguments).hidden_states
    return torch.cat([states[layer] for layer in layers], dim=-1)


@torch.no_grad()
def eagle_drafts(head: EagleHead, tokens: list[int], features: Tensor, count: int) -> list[int]:
    """Greedy drafts.

    Args:
        head: The head.
        tokens: For each feature the token after it.
        features: `[1, N, L t]`.
        count: How many.
    """
    cache = DynamicCache()
    output = head(torch.tensor([tokens]), head.fuse(features), cache=cache)
    drafted: list[int] = []
    for _ in range(count):
        drafted.append(int(head.scatter(output.logits[0, -1]).argmax()))
        output = head(torch.tensor([drafted[-1:]]), output.hidden_states[:, -1:], cache=cache)
    return drafted
