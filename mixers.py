"""Token mixers: every linear-time replacement for attention here is one equation with two choices.

    S_t = decay_t · S_{t-1} + k_t ⊗ write_t          o_t = S_tᵀ q_t          S: (K, V) per head, float32

    decay \\ write    add: write = v_t      delta: write = β_t (v_t − (decay_t · S_{t-1})ᵀ k_t)
    none             linear                delta
    one per head     retnet                gated_delta
    one per channel  gla                   kda

Read in this order: the definition (`recurrent`), the same answer by matmuls (`chunked`), the `Mixer` that
wraps a cell in projections, then one short subclass per mixer. `softmax` is the teacher's own row.

    letter  what it is                         called elsewhere
    B T H   batch, time, heads                 fla: the same; Mamba-2: b l h
    K V     width of a key, of a value         Mamba-2: state N, head P
    C       rows of a chunk                    fla: BT
    S       state, (B, H, K, V)                fla: h; Mamba-2: h; RWKV: transposed
    log_decay  log of what S keeps, ≤ 0        fla: g, gk; Mamba-2: A·dt; RWKV: log w
    beta    strength of a delta write          fla: beta; RWKV: the in-context rate a

`python mixers.py` prints the grid, the state each mixer carries and how far its forms differ.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

# ------------------------------------------------------------------ the equation and its forms


def recurrent(q, k, v, *, log_decay=None, beta=None, S=None):
    """The definition: one step of the equation at the top of this file per token.

    q, k (B, T, H, K); v (B, T, H, V); log_decay None | (B, T, H, 1) | (B, T, H, K), ≤ 0; beta None | (B, T, H, 1);
    S None | (B, H, K, V). Returns o like v, and S in float32 (float64 if v is). No scale inside: fold K^-½ into q.
    Raises ValueError for a wrong shape, dtype or device. Sources: arXiv 2102.11174 (delta), 2412.06464 eq. 10 (gated).
    """
    dtype, S = check(q, k, v, log_decay, beta, S)
    with torch.autocast(q.device.type, enabled=False):
        outputs = []
        for t in range(q.size(1)):
            q_t, k_t, write = (x[:, t].to(dtype) for x in (q, k, v))  # (B, H, K), (B, H, K), (B, H, V)
            if log_decay is not None:
                S = log_decay[:, t, :, :, None].to(dtype).exp() * S
            if beta is not None:
                write = beta[:, t].to(dtype) * (write - (k_t.unsqueeze(-2) @ S).squeeze(-2))
            S = S + k_t.unsqueeze(-1) * write.unsqueeze(-2)
            outputs.append((q_t.unsqueeze(-2) @ S).squeeze(-2))
    return torch.stack(outputs, 1).to(v.dtype), S


def chunked(q, k, v, *, log_decay=None, beta=None, S=None, chunk=64):
    """The same answer as `recurrent` (arguments, results, errors), with matmuls over chunks of `chunk` tokens.

    A delta write depends on the writes before it in its chunk and, linearly, on S before the chunk: write = u − w S. A
    triangular solve gives u and w of all chunks at once (the WY form, arXiv 2406.06484 eq. 10; gated, 2412.06464), and
    the loop carries S alone. A ragged last chunk is padded: a zero key writes nothing, a zero log_decay keeps all.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk: wanted a power of two (`scores` halves it), got {chunk}")
    dtype, S = check(q, k, v, log_decay, beta, S)
    T, V = q.size(1), v.size(-1)
    C = min(chunk, 1 << (T - 1).bit_length())  # no longer than the first power of two ≥ T

    def blocks(x):  # (B, T, H, D) -> (N, B, H, C, D)
        x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, -T % C))
        return x.unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4).contiguous()

    with torch.autocast(q.device.type, enabled=False):
        q, k, u = blocks(q), blocks(k), blocks(v)
        q_in, k_in, k_out, keep = q, k, k, [1.0] * len(q)  # seen from the chunk's start, from its end; what S keeps
        G = None if log_decay is None else blocks(log_decay).cumsum(-2)  # log of what is kept since the chunk began
        if G is not None:
            total, since = G[..., -1:, :], G.exp()
            q_in, k_in, k_out = q * since, k * since, k * (total - G).exp()
            keep = total.exp().mT.unbind()  # N times (B, H, K | 1, 1)
        reads = scores(q, k, G)  # (N, B, H, C, C)
        w = [None] * len(q)
        if beta is not None:
            beta = blocks(beta)
            right = torch.cat([u, k_in], -1) * beta
            solved = torch.linalg.solve_triangular(scores(k, k, G) * beta, right, upper=False, unitriangular=True)
            u, w = solved[..., :V], solved[..., V:].unbind()
        before, writes = [], []
        for u_n, w_n, k_n, keep_n in zip(u.unbind(), w, k_out.mT.unbind(), keep):
            before.append(S)
            writes.append(u_n if w_n is None else u_n - w_n @ S)
            S = keep_n * S + k_n @ writes[-1]
        o = q_in @ torch.stack(before) + reads @ torch.stack(writes)  # (N, B, H, C, V)
    return o.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :T].to(v.dtype), S


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


def scan(q, k, v, *, log_decay=None, beta=None, S=None, form="auto"):
    """One entry for all forms (arguments, results, errors as `recurrent`). auto: recurrent at T = 1, else chunked."""
    forms = {"recurrent": recurrent, "chunked": chunked}
    if form == "auto":
        form = "recurrent" if q.size(1) == 1 else "chunked"
    if form not in forms:
        raise ValueError(f"form: wanted one of auto, {', '.join(forms)}; got {form!r}")
    return forms[form](q, k, v, log_decay=log_decay, beta=beta, S=S)


def check(q, k, v, log_decay, beta, S):
    """-> (dtype to compute in, state to start from); ValueError names the argument, what was wanted and what came."""
    if q.dim() != 4 or v.dim() != 4 or 0 in q.shape:
        raise ValueError(
            f"q, v: wanted (B, T, H, K) and (B, T, H, V), none of them 0, got {(*q.shape,)}, {(*v.shape,)}"
        )
    (B, T, H, K), V = q.shape, v.size(-1)
    per_channel = log_decay is not None and log_decay.shape[-1:] != (1,)
    wanted = {
        "q": (q, (B, T, H, K)),
        "k": (k, (B, T, H, K)),
        "v": (v, (B, T, H, V)),
        "log_decay": (log_decay, (B, T, H, K if per_channel else 1)),
        "beta": (beta, (B, T, H, 1)),
        "S": (S, (B, H, K, V)),
    }
    for name, (x, shape) in wanted.items():
        if x is not None and (x.shape != shape or x.device != q.device or not x.is_floating_point()):
            raise ValueError(f"{name}: wanted floats {shape} on {q.device}, got {x.dtype} {(*x.shape,)} on {x.device}")
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    return dtype, q.new_zeros(B, H, K, V, dtype=dtype) if S is None else S.to(dtype)


# ------------------------------------------------------------------ what surrounds a cell


def rotate(x, position, base):
    """Rotary embedding (arXiv 2104.09864 eq. 34) in Llama's layout: the two halves of a head are the pairs.

    x (B, T, H, K), position (B | 1, T) counts tokens -> like x.
    """
    half = x.size(-1) // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = position[..., None, None].float() * frequency  # (B, T, 1, K/2)
    cos, sin = angle.cos(), angle.sin()
    a, b = wide(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def wide(x):
    """x in float32, or float64 if it is: what sums, norms and decays are computed in under bf16 matmuls."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def take(x, order):
    """Row order[b, t] of x[b] for every b and t: x (B, T, …), order (B, T') -> (B, T', …)."""
    return x[torch.arange(len(x), device=x.device)[:, None], order]


def unit(x):
    """x over its length; unlike F.normalize the gradient at 0 is finite."""
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def half_lives(heads, shortest=16, longest=512):
    """-> (heads,): geometric half-lives in tokens, some near and some far; log_decay is −ln 2 over them."""
    return shortest * (longest / shortest) ** torch.linspace(0, 1, heads)


GATES = {None: None, "silu": (F.silu, 1.278465), "sigmoid": (torch.sigmoid, 4.0)}  # bias: silu(1.2785) = 1


class Mixer(nn.Module):
    """q, k, v projections -> short convolution -> the cell -> per-head norm -> gate -> output projection.

    A mixer is a subclass: `parts` makes its extra parameters (started near the teacher), `cell` turns (x, q, k, v) into
    (q, k, v, log_decay, beta), `defaults` sets options; `decay` and `write` are its labels in the grid and the tables.

    Options, the same for all: conv = taps of a causal depthwise convolution on q, k, v (0: none), identity at start;
    rope = rotate q and k; gate = None | "silu" | "sigmoid", near 1 at start; window = W > 0 adds softmax over the last
    W tokens and the first `sinks` ones, at constant state; norm = RMSNorm of each head's output. The papers have norm
    on. It is off here: a softmax head with nothing to say says 0, which a normed head cannot (results/starts.md).
    """

    decay, write, defaults = "none", "add", {}
    options = dict(conv=4, rope=False, norm=False, gate=None, window=0, sinks=4)

    def __init__(self, config, **options):
        super().__init__()
        unknown = set(options) - set(self.options)
        if unknown:
            raise ValueError(f"option {', '.join(sorted(unknown))}: wanted one of {', '.join(self.options)}")
        options = self.options | self.defaults | options
        for name, value in options.items():
            kind = type(self.options[name])
            fits = value in GATES if name == "gate" else type(value) is kind and value >= 0
            if not fits:
                wanted = {int: "a whole number from 0", bool: "true or false"}.get(kind, "none, silu or sigmoid")
                raise ValueError(f"option {name} = {value!r}: wanted {wanted}")
        for name, value in options.items():
            setattr(self, name, value)
        self.width, self.heads, self.head_dim = config.width, config.heads, config.head_dim
        self.base, self.eps = config.rope_base, config.norm_eps
        H, K = self.heads, self.head_dim
        self.q, self.k, self.v = (nn.Linear(self.width, H * K, bias=False) for _ in range(3))
        self.o = nn.Linear(H * K, self.width, bias=False)
        if self.conv:
            taps = torch.zeros(3 * H * K, 1, self.conv, 1)
            taps[:, :, -1] = 1
            self.taps = nn.Parameter(taps)
        if self.gate:
            self.gate_proj = nn.Linear(self.width, H * K)
            nn.init.zeros_(self.gate_proj.weight)
            nn.init.constant_(self.gate_proj.bias, GATES[self.gate][1])
        self.scale = nn.Parameter(torch.full((H, K), 0.1 if self.window else 1.0))  # beside an exact window: small
        self.parts()

    def parts(self):
        """Make the parameters of the cell."""

    def cell(self, x, q, k, v):
        """x (B, T, width), q, k, v (B, T, H, K) -> (q, k, v, log_decay, beta) for `scan`."""
        return q, k, v, None, None

    def remember(self, half_life):
        """Start with these half-lives, (H,) in tokens, if the cell has any to set; `calibrate` measures them."""

    def forward(self, x, state=None, *, mask=None, form="auto"):
        """x (B, T, width) -> (y like x, state). mask (B, T) bool, False = padding, anywhere: it changes nothing.

        state: what came back for the tokens before x (None at the start); it holds S, the last inputs of the
        convolution, the window and the position, and its size does not grow.
        """
        if mask is None:
            return self.mix(x, state, None, form)
        order = mask.int().argsort(dim=1, stable=True)  # padding to the left; work; every row back in its place
        y, state = self.mix(take(x, order), state, take(mask, order), form)
        return take(y, order.argsort(1)), state

    def mix(self, x, state, mask, form):
        """`forward` with the padding, if any, on the left. old: the state so far, new: the next, filled on the way."""
        old, new = state or {}, {}
        position = self.positions(x, old, mask)
        new["position"] = position[:, -1:].expand(len(x), 1) + 1
        raw, (q, k, v, log_decay, beta) = self.streams(x, position, old, new, mask)
        if mask is not None:  # a zero key writes nothing, a zero log_decay forgets nothing
            k = k * mask[..., None, None]
            log_decay = None if log_decay is None else log_decay * mask[..., None, None]
        o, new["S"] = scan(q, k, v, log_decay=log_decay, beta=beta, S=old.get("S"), form=form)
        if self.norm:
            o = F.rms_norm(o, o.shape[-1:], eps=self.eps)
        o = o * self.scale.to(o.dtype)
        if self.gate:
            o = o * GATES[self.gate][0](self.gate_proj(x)).unflatten(-1, (-1, self.head_dim))
        if self.window:
            q, k = (rotate(z, position, self.base) for z in raw[:2])
            o = o + sliding_softmax(q, k, raw[2], position, mask, self.window, self.sinks, old, new)
        return self.o(o.flatten(2)), new

    def streams(self, x, position, old, new, mask):
        """-> (q, k, v as projected, what `scan` takes: q scaled, k, v, log_decay, beta), (B, T, H, …) each."""
        raw = [z.unflatten(-1, (-1, self.head_dim)) for z in (self.q(x), self.k(x), self.v(x))]
        q, k, v = self.convolve(raw, old, new, mask)
        if self.rope:
            q, k = (rotate(z, position, self.base) for z in (q, k))
        q, *rest = self.cell(x, q, k, v)
        return raw, (q * self.head_dim**-0.5, *rest)

    def positions(self, x, old, mask):
        """-> (B | 1, T): how many real tokens came before each row."""
        count = torch.arange(1, x.size(1) + 1, device=x.device)[None] if mask is None else mask.cumsum(1)
        return old["position"] + count - 1 if "position" in old else count - 1

    def convolve(self, raw, old, new, mask):
        """Causal depthwise convolution over q, k and v; the last conv − 1 inputs are its state."""
        if not self.conv:
            return raw
        z = torch.cat([part.flatten(2) for part in raw], -1)  # (B, T, 3 H K)
        if mask is not None:
            z = z * mask[..., None]
        tail = old["tail"] if "tail" in old else z.new_zeros(len(z), self.conv - 1, z.size(-1))
        z = torch.cat([tail.to(z.dtype), z], 1)
        if mask is not None and "tail" in old:  # padding must not stand between the tail and its tokens
            z = take(z, F.pad(mask, (self.conv - 1, 0), value=True).int().argsort(dim=1, stable=True))
        new["tail"] = z[:, z.size(1) - self.conv + 1 :]
        y = F.conv2d(z.mT.unsqueeze(-1), self.taps, groups=z.size(-1))  # a channels-last image of width 1: no copies
        return [part.unflatten(-1, (-1, self.head_dim)) for part in y.squeeze(-1).mT.chunk(3, -1)]

    def matrix(self, x):
        """The token-mixing matrix, x (B, T, width) -> (B, H, T, T): o = matrix · v before norm, gate and window."""
        q, k, _, log_decay, beta = self.streams(x, self.positions(x, {}, None), {}, {}, None)[1]
        eye = torch.eye(x.size(1), dtype=q.dtype, device=x.device)[None, :, None].expand(len(x), -1, self.heads, -1)
        return scan(q, k, eye, log_decay=log_decay, beta=beta)[0].transpose(1, 2)

    def state_size(self, T=0):
        """Floats that one layer carries per sequence while decoding, after T tokens or any other number of them."""
        per_token = 2 * self.heads * self.head_dim
        kept = self.window + self.sinks if self.window else 0
        tail = 3 * self.heads * self.head_dim * max(self.conv - 1, 0)
        return self.heads * self.head_dim**2 + tail + kept * per_token


def sliding_softmax(q, k, v, position, mask, window, sinks, old, new):
    """Softmax over the last `window` tokens and the first `sinks` of the sequence: linear in T, constant state.

    q, k, v (B, T, H, K) rotated -> (B, T, H, K). Queries go in blocks of `window`, each against its own block and the
    one before. Without the first tokens, where a pretrained softmax parks weight, it breaks down (arXiv 2309.17453).
    """
    B, T, H, K = q.shape
    mask = torch.ones(B, T, dtype=torch.bool, device=q.device) if mask is None else mask
    position = position.expand(B, T)
    if not old:
        empty = k.new_zeros(B, window + sinks, H, K)
        old = {"keys": empty, "values": empty, "seen": mask.new_zeros(B, window)}
    first = ((position[:, None] == torch.arange(sinks, device=q.device)[:, None]) & mask[:, None]).to(k.dtype)
    # [ring, padding, new] -> padding first, so that it does not stand in the window
    order = F.pad(mask, (window, 0), value=True).int().argsort(dim=1, stable=True)
    seen = take(torch.cat([old["seen"], mask], 1), order)

    def extend(kept, x):  # -> first tokens (B, sinks, H, K), the rest (B, window + T, H, K)
        sink = kept[:, :sinks] + torch.einsum("bst,bthk->bshk", first, x)
        return sink, take(torch.cat([kept[:, sinks:], x], 1), order)

    (sink_k, k), (sink_v, v) = extend(old["keys"].to(k.dtype), k), extend(old["values"].to(v.dtype), v)
    new["keys"], new["values"] = torch.cat([sink_k, k[:, T:]], 1), torch.cat([sink_v, v[:, T:]], 1)
    new["seen"] = seen[:, T:]
    W = min(window, T)  # rows of a block of queries
    pad = -T % W
    N = (T + pad) // W

    def rows(x, sink):  # -> (B N, H, sinks + window + W, K)
        x = F.pad(x, (0, 0, 0, 0, 0, pad)).unfold(1, window + W, W).permute(0, 1, 2, 4, 3)  # (B, N, H, window + W, K)
        return torch.cat([sink.transpose(1, 2)[:, None].expand(B, N, H, sinks, K), x], -2).flatten(0, 1)

    at = F.pad(position, (0, pad)).unflatten(1, (N, W))[..., None]  # (B, N, W, 1)
    # a column's place in its row's window: from 1, and `window` is the row itself
    ahead = torch.arange(window + W, device=q.device) - torch.arange(W, device=q.device)[:, None]
    seen = F.pad(seen, (0, pad)).unfold(1, window + W, W)[:, :, None]
    near = (seen | (ahead == window)) & (ahead > 0) & (ahead <= window)  # a padded row reads itself: finite, never read
    far = at - torch.arange(sinks, device=q.device) >= window  # a first token still in the window counts once
    allowed = torch.cat([far, near], -1).flatten(0, 1)[:, None]  # (B N, 1, W, sinks + window + W)
    q = F.pad(q, (0, 0, 0, 0, 0, pad)).unflatten(1, (N, W)).flatten(0, 1).transpose(1, 2)
    o = F.scaled_dot_product_attention(q, rows(k, sink_k), rows(v, sink_v), attn_mask=allowed)
    return o.transpose(1, 2).unflatten(0, (B, N)).flatten(1, 2)[:, :T]


# ------------------------------------------------------------------ the mixers

MIXERS = {}


def register(cls):
    """Enter a mixer in MIXERS under its class name in lower case: --mixer, the tests and the tables read it there."""
    MIXERS[cls.__name__.lower()] = cls
    return cls


def build(name, config, **options):
    """MIXERS[name] for one layer of `config` (width, heads, kv_heads, head_dim, rope_base, norm_eps)."""
    if name not in MIXERS:
        raise ValueError(f"mixer {name!r}: wanted one of {', '.join(MIXERS)}")
    return MIXERS[name](config, **options)


@register
class Softmax(Mixer):
    """The teacher's row: causal softmax attention, rotary, with shared key heads. Its state grows with T.

    Of Mixer it takes `forward` and `positions` alone.
    """

    decay = write = "softmax"
    options = {}

    def __init__(self, config):
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.base, self.window = config.rope_base, 0
        self.q = nn.Linear(config.width, self.heads * self.head_dim, bias=False)
        self.k, self.v = (nn.Linear(config.width, self.kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.o = nn.Linear(self.heads * self.head_dim, config.width, bias=False)

    def mix(self, x, state, mask, form):
        position = self.positions(x, state or {}, mask)
        q, k, v = (z.unflatten(-1, (-1, self.head_dim)) for z in (self.q(x), self.k(x), self.v(x)))
        q, k = (rotate(z, position, self.base).transpose(1, 2) for z in (q, k))  # (B, H, T, K)
        seen, v = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask, v.transpose(1, 2)
        if state:
            k, v = torch.cat([state["k"], k], 2), torch.cat([state["v"], v], 2)
            seen = torch.cat([state["seen"], seen], 1)
        allowed = None
        if state or mask is not None:
            T, total = q.size(2), k.size(2)
            causal = torch.ones(T, total, dtype=torch.bool, device=x.device).tril(total - T)
            allowed = causal & seen[:, None, None]
            if mask is not None:  # a padded row reads itself: finite, and nobody reads it
                allowed = allowed | (~mask[:, None, :, None] & causal)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None, enable_gqa=True)
        new = {"position": position[:, -1:].expand(len(x), 1) + 1, "k": k, "v": v, "seen": seen}
        return self.o(o.transpose(1, 2).flatten(2)), new

    def matrix(self, x):
        position = self.positions(x, {}, None)
        q, k = (rotate(z(x).unflatten(-1, (-1, self.head_dim)), position, self.base) for z in (self.q, self.k))
        k = k.repeat_interleave(self.heads // self.kv_heads, 2)
        A = torch.einsum("bihk,bjhk->bhij", q, k) * self.head_dim**-0.5
        return A.masked_fill(torch.ones_like(A, dtype=torch.bool).triu(1), -math.inf).softmax(-1)

    def state_size(self, T=0):
        """Floats per layer and sequence after T tokens: the KV cache."""
        return 2 * T * self.kv_heads * self.head_dim


@register
class Linear(Mixer):
    """No decay, added writes, features φ(z) = (Az + a) ⊙ (Bz + b), own maps for q and k (arXiv 2504.14366)."""

    def parts(self):
        H, K = self.heads, self.head_dim
        self.maps = nn.Parameter(torch.eye(K).repeat(2, 2, H, 1, 1))  # (q or k, A or B, H, K, K)
        self.shift = nn.Parameter(torch.zeros(2, 2, H, K))
        with torch.no_grad():
            self.maps[:, 1] *= 0.1  # near the identity: B starts small beside b = 1
            self.shift[:, 1] = 1

    def cell(self, x, q, k, v):
        def feature(z, side):
            a, b = torch.einsum("bthk,nhkj->nbthj", z, self.maps[side].to(z.dtype)) + self.shift[side, :, None, None]
            return a * b

        return feature(q, 0), feature(k, 1) / 64, v, None, None  # a sum of some hundred tokens starts of order 1


@register
class RetNet(Mixer):
    """Fixed decay γ_h = 1 − 2^(−5−h) per head, rotary q and k, gated (arXiv 2307.08621 eq. 8)."""

    decay, defaults = "head", dict(rope=True, gate="silu")

    def parts(self):
        self.register_buffer("log_decay", torch.log1p(-(2.0 ** (-5 - torch.arange(self.heads))))[:, None])

    def cell(self, x, q, k, v):
        return q, k, v, self.log_decay.expand(*k.shape[:3], 1), None


@register
class GLA(Mixer):
    """Decay per channel, logsigmoid(W₂ W₁ x + b) / 16 at rank 16, gated (arXiv 2312.06635 eq. 4)."""

    decay, defaults = "channel", dict(gate="silu")

    def parts(self):
        self.down, self.up = nn.Linear(self.width, 16, bias=False), nn.Linear(16, self.heads * self.head_dim)
        nn.init.normal_(self.up.weight, std=1e-3)
        self.remember(half_lives(self.heads))

    def remember(self, half_life):
        kept = (2 ** (-16 / half_life)).clamp(1e-12, 1 - 1e-6)  # per token, before the 16th root
        self.up.bias.data.copy_(torch.logit(kept).repeat_interleave(self.head_dim))

    def cell(self, x, q, k, v):
        log_decay = F.logsigmoid(wide(self.up(self.down(x)))) / 16
        return q, k, v, log_decay.unflatten(-1, (-1, self.head_dim)), None


@register
class Delta(Mixer):
    """Each write first erases what its unit key already recalls, by β = σ(w x) (arXiv 2406.06484 eq. 2)."""

    write = "delta"

    def parts(self):
        self.beta = nn.Linear(self.width, self.heads)
        nn.init.zeros_(self.beta.weight)
        nn.init.constant_(self.beta.bias, math.log(0.25 / 0.75))  # β = ¼, the nearest start (results/starts.md)

    def cell(self, x, q, k, v):
        return unit(q), unit(k), v, None, torch.sigmoid(self.beta(x)).unsqueeze(-1)


@register
class Gated_Delta(Delta):
    """delta, and all of S fades by exp(−exp(A_log) · softplus(w x + dt_bias)) per head (arXiv 2412.06464 eq. 10)."""

    decay, defaults = "head", dict(gate="silu")

    def parts(self, per_head=1, rank=None):
        super().parts()
        last = nn.Linear(rank or self.width, self.heads * per_head, bias=False)
        nn.init.normal_(last.weight, std=1e-3)
        self.dt = nn.Sequential(nn.Linear(self.width, rank, bias=False), last) if rank else last
        self.A_log = nn.Parameter(torch.zeros(self.heads, 1))
        self.dt_bias = nn.Parameter(torch.empty(self.heads, per_head))
        self.remember(half_lives(self.heads))

    def remember(self, half_life):
        self.dt_bias.data.copy_(torch.log(torch.expm1(math.log(2) / half_life))[:, None].expand_as(self.dt_bias))

    def cell(self, x, q, k, v):
        q, k, v, _, beta = super().cell(x, q, k, v)
        dt = wide(self.dt(x)).unflatten(-1, (self.heads, -1)) + self.dt_bias
        return q, k, v, -self.A_log.exp() * F.softplus(dt), beta


@register
class KDA(Gated_Delta):
    """gated_delta with a decay per channel at rank head_dim; sigmoid gate after the norm (arXiv 2510.26692)."""

    decay, defaults = "channel", dict(gate="sigmoid")

    def parts(self):
        super().parts(self.head_dim, rank=self.head_dim)


def main():
    """Print each mixer's place on the grid, its state and the largest difference between its forms."""
    from types import SimpleNamespace

    torch.manual_seed(0)
    config = SimpleNamespace(width=576, heads=9, kv_heads=3, head_dim=64, rope_base=1e5, norm_eps=1e-5)
    x = torch.randn(1, 200, config.width)
    print(f"{'mixer':<12}{'decay':<9}{'write':<9}{'state (floats a layer)':>24}{'chunked − recurrent':>22}   source")
    for name, cls in MIXERS.items():
        mixer = build(name, config)
        loop, fast = (mixer(x, form=form)[0] for form in ("recurrent", "chunked"))
        state = "grows" if name == "softmax" else f"{mixer.state_size():,}"
        source = cls.__doc__.rsplit("(", 1)[-1].rstrip(").") if "arXiv" in cls.__doc__ else ""
        print(f"{name:<12}{cls.decay:<9}{cls.write:<9}{state:>24}{(loop - fast).abs().max():>22.1e}   {source}")


if __name__ == "__main__":
    main()
