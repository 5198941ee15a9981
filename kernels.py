"""The equation of mixers.py by matmuls instead of a loop over time.

`chunked` gives the same answer as `mixers.recurrent`: outputs, final state and gradients, in PyTorch, on any device.
Read `recurrent` first. This file knows nothing of models: tensors go in, tensors come out.
"""

import math

import torch
import torch.nn.functional as F


def check(q, k, v, log_decay, beta, erase, S):
    """-> (dtype to compute in, state to start from); ValueError names the argument, what was wanted and what came."""
    if q.dim() != 4 or v.dim() != 4 or 0 in q.shape:
        raise ValueError(
            f"q, v: wanted (B, T, H, K) and (B, T, H, V), none of them 0, got {(*q.shape,)}, {(*v.shape,)}"
        )
    (B, T, H, K), V = q.shape, v.size(-1)
    per_channel = log_decay is not None and log_decay.shape[-1:] != (1,)
    wanted = {"q": (q, (B, T, H, K)), "k": (k, (B, T, H, K)), "v": (v, (B, T, H, V)), "S": (S, (B, H, K, V))}
    wanted |= {"log_decay": (log_decay, (B, T, H, K if per_channel else 1)), "beta": (beta, (B, T, H, 1))}
    wanted |= {f"erase[{i}]": (x, (B, T, H, K)) for i, x in enumerate(erase or ())}
    for name, (x, shape) in wanted.items():
        if x is not None and (x.shape != shape or x.device != q.device or not x.is_floating_point()):
            raise ValueError(f"{name}: wanted floats {shape} on {q.device}, got {x.dtype} {(*x.shape,)} on {x.device}")
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    return dtype, q.new_zeros(B, H, K, V, dtype=dtype) if S is None else S.to(dtype)


def chunked(q, k, v, *, log_decay=None, beta=None, erase=None, S=None, chunk=64):
    """The same answer as `recurrent` (arguments, results, errors), with matmuls over chunks of `chunk` rows.

    A delta write depends on the writes before it in its chunk and, linearly, on S before the chunk: write = u − w S. A
    triangular solve gives u and w of all chunks at once (the WY form, arXiv 2406.06484 eq. 10; gated, 2412.06464), and
    the loop carries S alone. A ragged last chunk is padded: a zero key writes nothing, a zero log_decay keeps all.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk: wanted a power of two (`scores` halves it), got {chunk}")
    dtype, S = check(q, k, v, log_decay, beta, erase, S)
    out, r = v.dtype, k  # r: the key whose recall a write takes back
    if erase is not None:
        q, r, k, v, log_decay, beta = two_rows(q, k, v, log_decay, beta, *erase)
    T, V = q.size(1), v.size(-1)
    C = min(chunk, 1 << (T - 1).bit_length())  # no longer than the first power of two ≥ T

    def blocks(x):  # (B, T, H, D) -> (N, B, H, C, D)
        x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, -T % C))
        return x.unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4).contiguous()

    with torch.autocast(q.device.type, enabled=False):
        r = None if beta is None else blocks(r)
        q, k, u = blocks(q), blocks(k), blocks(v)
        q_in, r_in, k_out, keep = q, r, k, [1.0] * len(q)  # seen from the chunk's start, from its end; what S keeps
        G = None if log_decay is None else blocks(log_decay).cumsum(-2)  # log of what is kept since the chunk began
        if G is not None:
            total, since = G[..., -1:, :], G.exp()
            q_in, r_in, k_out = q * since, r if r is None else r * since, k * (total - G).exp()
            keep = total.exp().mT.unbind()  # N times (B, H, K | 1, 1)
        reads = scores(q, k, G)  # (N, B, H, C, C)
        w = [None] * len(q)
        if beta is not None:
            beta = blocks(beta)
            right = torch.cat([u, r_in], -1) * beta
            solved = torch.linalg.solve_triangular(scores(r, k, G) * beta, right, upper=False, unitriangular=True)
            u, w = solved[..., :V], solved[..., V:].unbind()
        before, writes = [], []
        for u_n, w_n, k_n, keep_n in zip(u.unbind(), w, k_out.mT.unbind(), keep):
            before.append(S)
            writes.append(u_n if w_n is None else u_n - w_n @ S)
            S = keep_n * S + k_n @ writes[-1]
        o = q_in @ torch.stack(before) + reads @ torch.stack(writes)  # (N, B, H, C, V)
    o = o.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :T].to(out)
    return (o if erase is None else o[:, 1::2]), S


def two_rows(q, k, v, log_decay, beta, e, b):
    """A token that erases at another key becomes two delta rows: one takes back the recall of e along b, one writes."""
    one, row = torch.ones_like(k[..., :1]), lambda first, second: torch.stack([first, second], 2).flatten(1, 2)
    r = row(e, torch.zeros_like(k) if beta is None else k)
    log_decay = None if log_decay is None else row(log_decay, torch.zeros_like(log_decay))
    beta = row(one, one if beta is None else beta)
    return row(q, q), r, row(b, k), row(torch.zeros_like(v), v), log_decay, beta


def scores(x, y, G):
    """A_ij = Σ_d x_id y_jd exp(G_id − G_jd) for j ≤ i, else 0.  x, y (…, C, K), G None | (…, C, 1 | K) -> (…, C, C).

    exp(−G) alone overflows, so only differences ≤ 0 are exponentiated: masked first if there is one decay per head; per
    channel by halving, where the last early row is the reference point between the late rows and the early columns.
    """
    C = x.size(-2)
    if G is None:
        return (x @ y.mT).tril()
    if G.size(-1) == 1:
        future = torch.ones(C, C, dtype=torch.bool, device=x.device).triu(1)
        return x @ y.mT * (G - G.mT).masked_fill(future, -math.inf).exp()
    if C == 1:
        return (x * y).sum(-1, keepdim=True)
    x, y, G = (z.unflatten(-2, (2, C // 2)) for z in (x, y, G))
    near = scores(x, y, G)  # (…, 2, C/2, C/2): both halves against themselves
    middle = G[..., 0, -1:, :]
    late = x[..., 1, :, :] * (G[..., 1, :, :] - middle).exp()
    early = y[..., 0, :, :] * (middle - G[..., 0, :, :]).exp()
    top = F.pad(near[..., 0, :, :], (0, C // 2))
    return torch.cat([top, torch.cat([late @ early.mT, near[..., 1, :, :]], -1)], -2)
