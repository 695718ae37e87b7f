"""From words to context vectors, one step at a time, with every shape and number: `python examples/walkthrough.py`.

The sentence has six words. We follow the second, "is", from its number in the vocabulary to the vector that holds what
it read in the others. Then: four ways to hide the future, and what shapes say when something is wrong.
"""

import torch
from torch import Tensor

from attn_spec.reference.scratch.causal_self_attention import CausalSelfAttention, CausalSelfAttentionRenormalised
from attn_spec.reference.scratch.self_attention import SelfAttention

SENTENCE = "Life is short, eat dessert first"
WORDS = SENTENCE.replace(",", "").split()
IS, DESSERT, FIRST = 1, 4, 5  # places in the sentence, counted from 0


def numbers(row: Tensor) -> str:
    return " ".join(f"{x:8.4f}" for x in row.tolist())


def show(step: str, x: Tensor, word: int | None = None) -> None:
    """Print what a step gives: all rows, each beside its word, or the row of one word."""
    print(f"{step}  {list(x.shape)}")
    for i in range(len(WORDS)) if word is None else [word]:
        print(f"   {WORDS[i]:>8} {numbers(x[i])}")


def read_the_sentence() -> tuple[Tensor, SelfAttention]:
    """Every step of self-attention on the sentence; returns the embedded words [6, 3] and the same as a module."""
    torch.manual_seed(123)
    embedding = torch.nn.Embedding(50_000, 3)  # 50,000 words, three numbers for each

    # 1. A word is its number in the vocabulary, which is in alphabetical order.
    vocabulary = {word: number for number, word in enumerate(sorted(WORDS))}
    ids = torch.tensor([vocabulary[word] for word in WORDS])  # [6]
    print(f"1 words to numbers  {list(ids.shape)}\n   {', '.join(f'{w} {i}' for w, i in zip(WORDS, ids, strict=True))}")

    # 2. Its number picks a row of the embedding.
    x = embedding(ids)  # [6, 3]
    show("2 embed: x", x)

    # 3. Three matrices make of each word what it looks for, what it is found by, and what it hands over.
    torch.manual_seed(123)
    w_query, w_key = torch.rand(3, 2), torch.rand(3, 2)  # q and k meet in a product: the same width
    w_value = torch.rand(3, 4)  # v is only added up: any width
    q, k, v = x @ w_query, x @ w_key, x @ w_value  # [6, 2], [6, 2], [6, 4]
    show("3 project: q = x W_query", q, IS)
    show("          k = x W_key", k, IS)
    show("          v = x W_value", v, IS)

    # 4. How well what a word looks for fits what another is found by: one product for each pair of words.
    scores = q @ k.T  # [6, 2] @ [2, 6] -> [6, 6]: row = who looks, column = who is seen
    show("4 score: q k'", scores)
    print(f"   'is' with 'dessert': {scores[IS, DESSERT]:.4f}")
    print(f"   min {scores.min():.4f}, max {scores.max():.4f}, mean {scores.mean():.4f}, std {scores.std():.4f}")

    # 5. A product of d numbers spreads like sqrt(d); dividing by it keeps the softmax away from 0 and 1.
    scaled = scores / q.shape[-1] ** 0.5  # [6, 6]
    show("5 scale: / sqrt(2)", scaled, IS)

    # 6. Shares of attention: positive, and each row adds up to 1.
    weights = torch.softmax(scaled, dim=-1)  # [6, 6]
    show("6 weigh: softmax over each row", weights)

    # 7. What the words hand over, mixed by these shares.
    context = weights @ v  # [6, 6] @ [6, 4] -> [6, 4]
    show("7 mix: context = weights v", context)

    # The module holds the same matrices, drawn in the same order.
    torch.manual_seed(123)
    attention = SelfAttention(d_in=3, d_out_kq=2, d_out_v=4)
    print(f"  SelfAttention(3, 2, 4) differs by {(attention(x) - context).abs().max():.1e}")
    return x, attention


def hide_the_future(x: Tensor, attention: SelfAttention) -> None:
    """Four facts about a causal mask: where it stands decides whether the future is hidden."""
    before, after = CausalSelfAttention(3, 2, 4), CausalSelfAttentionRenormalised(3, 2, 4)
    before.load_state_dict(attention.state_dict())
    after.load_state_dict(attention.state_dict())
    past = torch.ones(6, 6).tril()  # 1 for the word itself and those before it
    changed = x.clone()
    changed[FIRST] *= -1  # another last word, which no other word may notice

    def weigh(x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = attention.project(x)
        return q @ k.T / 2**0.5, v

    scores, v = weigh(x)
    print("\nHiding the future from 'is', which may see 'Life' and itself; then another last word is put in")
    weights = torch.softmax(scores.masked_fill(past == 0, -torch.inf), dim=-1)
    moved = (before(changed) - before(x))[IS].abs().max()
    print(f"a before the softmax: the row adds up to {weights[IS].sum():.4f}, 'is' moves by {moved:.4f}")
    print(f"   {numbers(weights[IS])}")

    weights = torch.softmax(scores, dim=-1) * past
    other_scores, other_v = weigh(changed)
    moved = (torch.softmax(other_scores, dim=-1) * past @ other_v - weights @ v)[IS].abs().max()
    print(
        f"b after, and no more: the row adds up to {weights[IS].sum():.4f}, 'is' moves by {moved:.4f}: the future leaks"
    )
    print(f"   {numbers(weights[IS])}")

    apart = (after(x) - before(x)).abs().max()
    print(f"c after, rows divided by their sum: the same as a within {apart:.1e}")

    changed[FIRST] = -200 * x[FIRST]  # scores so high that the shares of all others fall below the smallest float
    print("d as c, with a last word of -200 times its size: 'is' becomes 0/0")
    print(f"   a {numbers(before(changed)[IS])}\n   c {numbers(after(changed)[IS])}")


def read_the_shapes(x: Tensor, attention: SelfAttention) -> None:
    """What goes wrong with shapes, what the message means, and the mistake that gives no message."""
    print("\nWhen shapes don't fit: print them all, and read [a, b] @ [b, c] -> [a, c]")
    try:
        x @ torch.rand(4, 2)
    except RuntimeError as error:
        print(f"x [6, 3] @ W [4, 2]: {error}\n   the inner sizes, 3 and 4, must be equal: W is for words of width 4")
    try:
        attention(torch.rand(6, 4))
    except ValueError as error:
        print(f"a module that checks its sizes says so itself: {error}")

    batch = torch.stack([x, x, x])  # [3, 6, 3]
    q, k, _ = attention.project(batch)  # [3, 6, 2]
    reverse = k.permute(2, 1, 0)  # what k.T does: it turns all axes round, and not the last two
    print(f"k {list(k.shape)}: k.T {list(reverse.shape)}, but k.transpose(-2, -1) {list(k.transpose(-2, -1).shape)}")
    try:
        q @ reverse
    except RuntimeError as error:
        print(f"q @ k.T: {error}")
    q, k, _ = attention.project(x[:4].view(2, 2, 3))  # two sentences of two words, keys of width 2
    wrong, right = q @ k.permute(2, 1, 0), q @ k.transpose(-2, -1)
    print(f"where batch, words and key width are equal it fits, {list(wrong.shape)}, and is silently wrong:")
    print(f"   k.T {numbers(wrong.flatten())}\n   not {numbers(right.flatten())}")


@torch.no_grad()
def main() -> None:
    x, attention = read_the_sentence()
    hide_the_future(x, attention)
    read_the_shapes(x, attention)


if __name__ == "__main__":
    main()
