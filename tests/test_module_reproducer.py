"""Reproducers of modules: they need nothing of ours, fail on the wrong class, and pass on the mended one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.modules.construct import Sizes
from attn_spec.adapters.modules.written import Making, NotWritten, text_of
from attn_spec.adapters.resolve import resolve
from attn_spec.check import one_thread
from attn_spec.engine import Subject
from attn_spec.report.judgement import Judgement
from attn_spec.report.reproducer import reproducer
from attn_spec.suites import all_tests

# a line with `# mended: ...` is the fault; the mended class has what stands behind the mark
MODULES = """
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x):
    return x.transpose(1, 2).flatten(2)


class CausalGPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        n = config.block_size
        future = torch.ones(n, n).triu(2)  # mended: torch.ones(n, n).triu(1)
        self.register_buffer("past", future == 0)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = (split(y, self.n_head) for y in self.c_attn(x).chunk(3, -1))
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~self.past[:n, :n], -torch.inf)
        return self.c_proj(merge(self.dropout(s.softmax(-1)) @ v))


@dataclass
class LlamaConfig:
    hidden_size: int = 64
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    attention_dropout: float = 0.0


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        d = config.hidden_size // self.heads
        self.q_proj = nn.Linear(config.hidden_size, self.heads * d, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(self.heads * d, config.hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None):
        q, k = split(self.q_proj(hidden_states), self.heads), split(self.k_proj(hidden_states), self.kv_heads)
        v = split(self.v_proj(hidden_states), self.kv_heads)
        n = self.heads // self.kv_heads
        heads = torch.arange(self.heads) % self.kv_heads  # mended: torch.arange(self.heads) // n
        k, v = k[:, heads], v[:, heads]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.o_proj(merge(out)), None


class ViT(nn.Module):
    def __init__(self, dim, num_heads=4, qkv_bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.scale = dim**-0.5  # mended: (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(merge((q @ k.mT * self.scale).softmax(-1) @ v))


class Bare(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_qkv, self.b_qkv = nn.Parameter(torch.randn(dim, 3 * dim)), nn.Parameter(torch.randn(3 * dim))
        self.W_o = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x):
        q, k, v = (split(y, self.num_heads) for y in (x @ self.W_qkv + self.b_qkv).chunk(3, -1))
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-2)  # mended: (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return merge(weights @ v) @ self.W_o


class Head(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        s = q @ k.mT  # mended: q @ k.mT * k.shape[-1] ** -0.5
        return s.softmax(-1) @ v


class HeadList(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.heads = nn.ModuleList([Head(dim, dim // num_heads) for _ in range(num_heads)])
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x):
        return self.out_proj(torch.cat([head(x) for head in self.heads], -1))


class Cross(nn.Module):
    def __init__(self, query_dim, context_dim, heads=4, dim_head=8):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(query_dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(context_dim, 2 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, query_dim), nn.Dropout(0.0))

    def forward(self, x, context, mask=None):
        q = split(self.to_q(x), self.heads)
        k, v = (split(y, self.heads) for y in self.to_kv(context).chunk(2, -1))
        if mask is not None:
            mask = ~mask[:, None, None, :]  # mended: mask[:, None, None, :]
        return self.to_out(merge(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class CrossSame(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context=None):
        context = x if context is None else context
        source = x if context.shape == x.shape else context  # mended: context
        k, v = (split(y, self.heads) for y in self.to_kv(source).chunk(2, -1))
        return self.to_out(merge(F.scaled_dot_product_attention(split(self.to_q(x), self.heads), k, v)))


class Wrapped(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)

    def forward(self, x, causal=False):
        n = x.shape[1]
        hidden = torch.ones(n, n).tril().bool()  # mended: torch.ones(n, n).triu(1).bool()
        return self.attn(x, x, x, attn_mask=hidden if causal else None, need_weights=False)[0]


class Multihead(nn.MultiheadAttention):
    def __init__(self, embed_dim, num_heads):
        super().__init__(embed_dim, num_heads)

    def forward(self, query, key, value, attn_mask=None, need_weights=True):
        attn_mask = None  # mended: attn_mask
        return super().forward(query, key, value, attn_mask=attn_mask, need_weights=need_weights)


class Plain(nn.Module):
    def __init__(self, d_model, n_heads, dropout=0.0):
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (split(w(x), self.n_heads) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.drop(merge(self.attend(q, k, v, mask))))

    def attend(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def drop(self, x):
        return F.dropout(x, self.dropout, self.training)


class DropsInEval(Plain):
    def drop(self, x):
        return F.dropout(x, self.dropout)  # mended: return F.dropout(x, self.dropout, self.training)


class KeyDetached(Plain):
    def attend(self, q, k, v, mask):
        k = k.detach()  # mended: k
        return super().attend(q, k, v, mask)


class ProjectionForgotten(Plain):
    def forward(self, x, mask=None):
        q, k, v = (split(w(x), self.n_heads) for w in (self.wq, self.wk, self.wv))
        out = merge(self.attend(q, k, v, mask))
        return out  # mended: return self.wo(out)


made_forgotten = ProjectionForgotten(24, 3)


class KeepsLength(Plain):
    kept = None

    def attend(self, q, k, v, mask):
        self.kept = self.kept or q.shape[2]  # mended: self.kept = q.shape[2]
        self.kept = min(self.kept, q.shape[2])
        out = super().attend(q, k, v, mask)
        return out * (self.kept / q.shape[2])


class TrainsOtherwise(Plain):
    def attend(self, q, k, v, mask):
        causal = self.training and mask is None  # mended: causal = False
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


class OverBatch(Plain):
    def attend(self, q, k, v, mask):
        v = v - v.mean(0, keepdim=True)  # mended: v
        return super().attend(q, k, v, mask)


class FastPath(Plain):
    def attend(self, q, k, v, mask):
        q = q if torch.is_grad_enabled() and q.requires_grad else q * 0.5  # mended: q
        return super().attend(q, k, v, mask)


class SharedWeights(Plain):
    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads)
        self.wk = self.wq  # mended: nn.Linear(d_model, d_model)


class InPlace(Plain):
    def forward(self, x, mask=None):
        x *= 0.5  # mended: x = x * 0.5
        return super().forward(x, mask)


class OneSequence(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.wo = nn.Linear(d_model, d_model)

    def forward(self, x):
        n, width = x.shape
        q, k, v = (w(x).view(n, self.n_heads, -1).transpose(0, 1) for w in (self.wq, self.wk, self.wv))
        s = q @ k.mT  # mended: q @ k.mT * q.shape[-1] ** -0.5
        return self.wo((s.softmax(-1) @ v).transpose(0, 1).reshape(n, width))


class SeqFirst(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.batch_first = num_heads, False
        self.in_proj_weight = nn.Parameter(torch.randn(3 * embed_dim, embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        w_q, w_k, w_v = self.in_proj_weight.chunk(3)
        q, k, v = (split((x @ w.mT).transpose(0, 1), self.num_heads) for w in (w_q, w_k, w_v))
        s = q @ k.mT * self.num_heads**-0.5  # mended: q @ k.mT * q.shape[-1] ** -0.5
        return self.out_proj(merge(s.softmax(-1) @ v)).transpose(0, 1)
"""
# class -> codes that have to be among what is shown
CASES = {
    "CausalGPT": ("ATN404", "ATN450", "ATN650"),
    "Llama": ("ATN601", "ATN650"),
    "ViT": ("ATN301", "ATN650"),
    "Bare": ("ATN103", "ATN650"),
    "HeadList": ("ATN301", "ATN650"),
    "made_forgotten": ("ATN650", "ATN951"),
    "Cross": ("ATN516", "ATN550"),
    "CrossSame": ("ATN652",),
    "Wrapped": ("ATN203", "ATN450"),
    "Multihead": ("ATN501",),
    "DropsInEval": ("ATN1150",),
    "KeyDetached": ("ATN951",),
    "ProjectionForgotten": ("ATN650", "ATN951"),
    "KeepsLength": ("ATN1251",),
    "TrainsOtherwise": ("ATN1151",),
    "OverBatch": ("ATN1250",),
    "FastPath": ("ATN1252",),
    "SharedWeights": ("ATN651",),
    "InPlace": ("ATN1251",),
    "OneSequence": ("ATN301",),
    "SeqFirst": ("ATN301", "ATN650"),
}
DECLARED = {"OneSequence": {"input": "SD"}}
RUN = """
import json, runpy, sys
sys.modules["attn_spec"] = None  # importing it fails
import torch
torch.set_num_threads(1)
out = {}
for path in sys.argv[1:]:
    try:
        runpy.run_path(path)
        out[path] = "held"
    except BaseException as error:
        out[path] = f"{type(error).__name__}: {error}"
print(json.dumps(out))
"""


def mended(text: str) -> str:
    """The same classes without their faults."""

    def mend(match: re.Match[str]) -> str:
        space, line, right = match.groups()
        statement = right.startswith(("return ", "self.", "causal = ", "x = "))
        return f"{space}{right}" if statement else f"{space}{line.partition(' = ')[0]} = {right}"

    return re.sub(r"^( +)(.*)  # mended: (.*)$", mend, text, flags=re.MULTILINE)


def judged(path: Path, name: str, codes: tuple[str, ...]) -> Judgement:
    found = resolve(f"{path}:{name}")
    implementation = adapt(
        found.object,
        name=name,
        target_name=found.target,
        import_line=found.import_line,
        declared=DECLARED.get(name),
    )
    subject = Subject(implementation)
    for _, test_name, test in all_tests():
        if test.law.code in (*codes, "ATN102", "ATN203", "ATN501") and subject.takes(test.law):
            for problem in sorted(test.problems("quick"), key=lambda p: p.cost)[:5]:
                subject.judge(test.law, problem, test_name)
    return Judgement(implementation, subject.results)


def written_scripts(path: Path, name: str, codes: tuple[str, ...]) -> dict[str, str]:
    """The reproducers of one class, by class and code: of these codes, and of all else that is found."""
    scripts = {}
    judgement = judged(path, name, codes)
    shown = {one.first.code: one.first for one in judgement.merged()}
    by_code = {r.code: r for r in reversed(judgement.with_outcome("failed"))} | shown
    assert set(codes) <= set(by_code), (name, sorted(by_code))
    for code in codes if name == "KeepsLength" else sorted({*codes, *shown}):  # others of it need the calls before
        text = reproducer(judgement.implementation, by_code[code].problem, by_code[code])
        assert "attn_spec" not in text, text
        assert "attn-spec failed" not in text, text
        assert not re.search(r"to be looked at|compares several calls|no short script", text), (name, code, text)
        scripts[f"{name}-{code}"] = text
    return scripts


def outcomes(paths: list[Path]) -> dict[str, str]:
    command = [sys.executable, "-c", RUN, *map(str, paths)]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_each_fails_on_the_wrong_class_and_passes_on_the_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    for folder, text in ((wrong, MODULES), (right, mended(MODULES))):
        folder.mkdir()
        (folder / "judged_modules.py").write_text(text)
    assert "# mended" not in mended(MODULES)
    scripts: dict[str, str] = {}
    with one_thread():
        for name, codes in CASES.items():
            scripts |= written_scripts(wrong / "judged_modules.py", name, codes)
    paths = {}
    for folder in (wrong, right):
        for name, text in scripts.items():
            path = folder / f"{name}.py"
            path.write_text(text.replace(str(wrong), str(folder)))
            paths[str(path)] = folder
    found = outcomes([Path(path) for path in paths if paths[path] is wrong])
    assert {path: said for path, said in found.items() if not said.startswith("AssertionError")} == {}
    found = outcomes([Path(path) for path in paths if paths[path] is right])
    assert {path: said for path, said in found.items() if said != "held"} == {}


class ByItem(torch.nn.Module):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        self.heads, width = config["n_head"], config.get("n_embd", 0)
        self.qkv = torch.nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_config_that_is_asked_by_items_is_a_dict() -> None:
    implementation = adapt(ByItem, name="ByItem")
    making = Making(implementation.adapter.module, Sizes(3, 3, 8, 8, reading=1), "")  # type: ignore[attr-defined]
    making.module()
    written = making.written()
    assert written.module == "ByItem(dict(n_head=3, n_embd=24))"
    assert written.imports == [f"from {__name__} import ByItem"]


def test_what_stands_in_for_no_import_is_said() -> None:
    class Local(ByItem):
        pass

    implementation = adapt(Local, name="Local")
    making = Making(implementation.adapter.module, Sizes(reading=1), "")  # type: ignore[attr-defined]
    making.module()
    assert making.written().imports == ["Local = ...  # your class"]


def test_arguments_of_forward_as_text() -> None:
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(2, 1, 5, 5, generator=g) < 0.5
    names = {"x": torch.zeros(2, 5, 24), "mask": mask, "heads": 3}
    assert text_of(~mask, names) == "~mask"
    assert eval(text_of((torch.ones(1, 5, 8), 0.5), {}), {"torch": torch})[0].shape == (1, 5, 8)
    by_head = (~mask).expand(2, 3, 5, 5).flatten(0, 1)
    assert torch.equal(eval(text_of(by_head, names), {"torch": torch, **names}), by_head)
    with pytest.raises(NotWritten, match="a tensor of shape"):
        text_of(torch.randn(9, 9), names)
    with pytest.raises(NotWritten, match="type object"):
        text_of(object(), names)
