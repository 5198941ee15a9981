"""Token mixers: every linear-time replacement for attention here is one equation with two choices.

    S_t = decay_t · S_{t-1} + k_t ⊗ write_t          o_t = S_tᵀ q_t          S: (K, V) per head, float32

    decay \\ write    add: write = v_t                        delta: write = β_t (v_t − (decay_t · S_{t-1})ᵀ k_t)
    none             linear, t2r, hedgehog, rebased, based   delta
    one per head     retnet, supra, mamba2, xlstm            gated_delta
    one per channel  gla, metala, hgrn2, dfw                 kda

Unrolled without decay, o_t = Σ_{i ≤ t} (q_t·k_i) v_i is attention without the softmax; a feature map φ brings φ(q)·φ(k)
nearer to exp(q·k). A channel is one of the K of a key. Off the grid: softmax is the teacher's row; rwkv7 (a decay per
channel) erases at another key than it writes to.

Read in this order: the definition (`recurrent`; kernels.py has the same answer by matmuls), what surrounds a cell
(feature maps, decays, the window of a hybrid), the `Mixer` around it, then one short subclass per mixer.

    letter  what it is                         called elsewhere
    B T H   batch, time, heads                 fla: the same; Mamba-2: b l h
    K V     width of a key, of a value         Mamba-2: state N, head P
    C       rows of a chunk                    fla: BT
    S       state, (B, H, K, V)                fla: h; Mamba-2: h; RWKV: transposed
    φ       feature map of q and k             Hedgehog, T2R, Performer: the same
    log_decay  log of what S keeps, ≤ 0        fla: g, gk; Mamba-2: A·dt; RWKV: log w
    beta    strength of a delta write          fla: beta; RWKV: the in-context rate a

`python mixers.py` prints each mixer's costs and how far its forms differ, `--picture OUT.png` draws what each one sees.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import check, chunked, kernel, triton

# ------------------------------------------------------------------ the equation


def recurrent(q, k, v, *, log_decay=None, beta=None, erase=None, S=None):
    """The definition: one step of the equation at the top of this file per token.

    q, k (B, T, H, K); v (B, T, H, V); log_decay None | (B, T, H, 1) | (B, T, H, K), ≤ 0; beta None | (B, T, H, 1);
    erase None | (e, b), both (B, T, H, K): before the write S loses b ⊗ Sᵀe; S None | (B, H, K, V).
    Returns o like v, and S in float32 (float64 if v is). No scale inside: fold K^-½ into q. Raises ValueError for a
    wrong shape, dtype or device. Sources: arXiv 2102.11174 (delta), 2412.06464 eq. 10 (gated), 2503.14456 (erase).
    """
    dtype, S = check(q, k, v, log_decay, beta, erase, S)
    with torch.autocast(q.device.type, enabled=False):
        outputs = []
        for t in range(q.size(1)):
            q_t, k_t, write = (x[:, t].to(dtype) for x in (q, k, v))  # (B, H, K), (B, H, K), (B, H, V)
            if log_decay is not None:
                S = log_decay[:, t, :, :, None].to(dtype).exp() * S
            if erase is not None:
                e, b = (x[:, t].to(dtype) for x in erase)
                S = S - b.unsqueeze(-1) * (e.unsqueeze(-2) @ S)
            if beta is not None:
                write = beta[:, t].to(dtype) * (write - (k_t.unsqueeze(-2) @ S).squeeze(-2))
            S = S + k_t.unsqueeze(-1) * write.unsqueeze(-2)
            outputs.append((q_t.unsqueeze(-2) @ S).squeeze(-2))
    return torch.stack(outputs, 1).to(v.dtype), S


def scan(q, k, v, *, form="auto", **more):
    """One entry for all forms (arguments, results, errors as `recurrent`).

    auto: kernel on CUDA with triton; else recurrent at T = 1, chunked beyond.
    """
    forms = {"recurrent": recurrent, "chunked": chunked, "kernel": kernel}
    if form == "auto":
        form = "kernel" if q.is_cuda and triton else "recurrent" if q.size(1) == 1 else "chunked"
    if form not in forms:
        raise ValueError(f"form: wanted one of auto, {', '.join(forms)}; got {form!r}")
    return forms[form](q, k, v, **more)


# ------------------------------------------------------------------ what surrounds a cell


class Rotary:
    """Rotary embedding (arXiv 2104.09864 eq. 34) in Llama's layout: the two halves of a head are the pairs.

    scaling, as in Hugging Face's config.json, stretches it beyond the context it was trained on: {} | {"rope_type":
    "linear" | "llama3" | "yarn", "factor": …}. Sources: Llama 3.1's model card; YaRN, arXiv 2309.00071 section 3.
    """

    def __init__(self, dim, base, scaling=None):
        with torch.device("cpu"):
            f = 1 / base ** (torch.arange(0, dim, 2) / dim)  # in this order, in float32: the bits count at position 10⁵
            f, self.factor = stretched(f, base, scaling or {})
        self.frequency = f.tolist()

    def __call__(self, x, position):
        """x (B, T, H, ≥ dim), position (B | 1, T) counts tokens -> like x; channels beyond dim stay."""
        angle = position[..., None, None].float() * torch.tensor(self.frequency, device=x.device)  # (B, T, 1, dim / 2)
        cos, sin, half = angle.cos() * self.factor, angle.sin() * self.factor, len(self.frequency)
        a, b, rest = wide(x).split([half, half, x.size(-1) - 2 * half], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


def stretched(f, base, s):
    """f (dim / 2,), radians a token -> (f as the scaling s has it, what cos and sin are multiplied with).

    llama3 and yarn (eq. 19-22) leave the waves that turn often in the old context, stretch the long ones by the whole
    factor and those between in part.
    """
    kind, factor = s.get("rope_type", s.get("type", "default")), s.get("factor") or 1.0
    evenly = {"default": 1.0, "linear": factor, "divisors": s.get("divisors")}  # the last in a GGUF of Llama 3
    if kind in evenly:
        return f / torch.tensor(evenly[kind]), 1.0
    if kind not in ("llama3", "yarn"):
        raise ValueError(f"rope_scaling {kind!r} is not known here; linear, llama3 and yarn are")
    old = s["original_max_position_embeddings"]
    if kind == "llama3":
        low, high, sharper = s["low_freq_factor"], s["high_freq_factor"], 1.0
        kept = (old * f / (2 * math.pi) - low) / (high - low)
    else:
        index = lambda turns: len(f) * math.log(old / (2 * math.pi * turns), base)  # of the wave that turns so often
        low, high = index(s.get("beta_fast") or 32), index(s.get("beta_slow") or 1)
        if s.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(f) - 1)
        kept = 1 - (torch.arange(len(f)) - low) / max(high - low, 1e-3)
        grown = lambda m: 0.1 * m * math.log(max(factor, 1)) + 1
        m, all_m = s.get("mscale"), s.get("mscale_all_dim")
        sharper = s.get("attention_factor") or (grown(m) / grown(all_m) if m and all_m else grown(1))
    return f * torch.lerp(torch.tensor(1 / factor), torch.tensor(1.0), kept.clamp(0, 1)), sharper


def wide(x):
    """x in float32, or float64 if it is: what sums, norms and decays are computed in under bf16 matmuls."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit(x):
    """x over its length; unlike F.normalize the gradient at 0 is finite."""
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def take(x, order):
    """Row order[b, t] of x[b] for every b and t: x (B, T, …), order (B, T') -> (B, T', …)."""
    return x[torch.arange(len(x), device=x.device)[:, None], order]


class Past:
    """What is kept between the pieces of a sequence: `old` came in, `new` goes out; `mask` says what is padding."""

    def __init__(self, state=None, mask=None):
        self.old, self.new, self.mask = state or {}, {}, mask

    def carry(self, name, x, n):
        """x (B, T, …) after the n rows before it (zeros at the start) -> (B, n + T, …); keeps the last n for next time.

        Padding comes last, so what is kept ends where it begins.
        """
        tail = self.old[name] if name in self.old else x.new_zeros(len(x), n, *x.shape[2:])
        z = torch.cat([tail.to(x.dtype), x], 1)
        if self.mask is None:
            self.new[name] = z[:, x.size(1) :].clone()  # a view would keep all of z
        else:
            self.new[name] = take(z, self.mask.sum(1, keepdim=True) + torch.arange(n, device=x.device))
        return z

    def positions(self, x):
        """-> (B | 1, T): how many real tokens came before each row of x, −1: it is padding."""
        count = torch.arange(1, x.size(1) + 1, device=x.device)[None] if self.mask is None else self.mask.cumsum(1)
        position = self.old.get("position", 0) + count - 1
        self.new["position"] = position[:, -1:].expand(len(x), 1) + 1
        return position if self.mask is None else position.masked_fill(~self.mask, -1)


# ------------------------------------------------------------------ feature maps, decays, the window of a hybrid


def random_maps(K, n=None, seed=0):
    """n ≤ K orthogonal directions of Gaussian length, the same in every layer (arXiv 2009.14794), (1, K, n)."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(K, K, generator=g, device="cpu", dtype=torch.float32) for _ in range(2))
    direction, R = torch.linalg.qr(a)
    direction = direction * R.diagonal().sign()  # uniform over rotations; without the signs it is not
    return (direction * b.norm(dim=0))[None, :, :n].to(torch.empty(0).device)


def taylor(y):
    """[1, y, y ⊗ y / √2]: φ(q)·φ(k) = 1 + s + s²/2 with s = q·k."""
    return torch.cat([torch.ones_like(y[..., :1]), y, (y.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2) / 2**0.5], -1)


identity = lambda K, n=1: torch.eye(K).repeat(n, 1, 1)  # maps to start from, (n, K, K)
split = lambda K: identity(K) / K**0.25  # of q and of k: together q·k / √K, as attention has it
both = lambda a, b: torch.cat([a, b], -1)
same = lambda z: z
normed = lambda z: F.layer_norm(z, z.shape[-1:])
at_2 = lambda z: 2 * unit(z)  # at length 2 exp(q·k) stays in reach

# φ of z (B, T, H, K): (maps to start from, is φ(q)·φ(k) ≥ 0, what z passes first, φ). φ reads z, t from 0 at the first
# token to π/2 at the end of the context and after, and what each map makes of z, (B, T, H, K'). hadamard is (A z + a) ⊙
# (B z + b) around z itself: its maps are both less the identity and 1. hedgehog's start as `split`: at a teacher's own
# lengths its softmax is nearly one-hot and training breaks down (20k tokens took KL from 3.10 to 4.38).
FEATURES = {
    "none": (None, False, same, lambda z, t: z),
    "relu": (None, True, same, lambda z, t: F.relu(z)),
    "elu": (None, True, same, lambda z, t: F.elu(z) + 1),  # 2006.16236
    "hadamard": (lambda K: identity(K, 2) / 10, False, same, lambda z, t, a, b: (z + a) * (1 + b)),  # 2504.14366
    "t2r": (identity, True, same, lambda z, t, y: F.relu(y)),  # 2103.13076
    "hedgehog": (split, True, same, lambda z, t, y: both(y.softmax(-1), (-y).softmax(-1))),  # 2402.04347
    "rebased": (lambda K: torch.ones(1, K), True, normed, lambda z, t, y: y.square()),  # 2402.10644
    "taylor": (lambda K: random_maps(K, 16) / K**0.5, True, at_2, lambda z, t, y: taylor(y)),  # 2402.18668
    "cosformer": (None, True, F.relu, lambda z, t: both(z * t.cos(), z * t.sin())),  # 2202.08791
    "performer": (random_maps, True, unit, lambda z, t, y: torch.exp(y - 1 / 2)),  # 2009.14794
    "rfa": (random_maps, False, unit, lambda z, t, y: both(y.sin(), y.cos())),  # 2103.02143: Σ cos(q − k)
}


class Feature(nn.Module):
    """φ for q or for k by a row of FEATURES, (B, T, H, K) -> (B, T, H, K').

    It learns maps and shifts, one a head; but performer's and rfa's stay as drawn, as in their papers.
    """

    def __init__(self, name, heads, dim, context):
        super().__init__()
        maps, _, self.before, self.phi = FEATURES[name]
        self.context, keep = context, nn.Buffer if maps is random_maps else nn.Parameter
        if maps:
            start = maps(dim)  # (n, K, K'), or (n, K) for a gain per channel
            self.maps = keep(torch.stack([start] * heads, 1))
            self.shift = keep(torch.zeros(len(start), heads, start.size(-1)))

    def forward(self, z, position):
        t = (position[..., None, None] / self.context).clamp(max=1) * (math.pi / 2)
        z = self.before(wide(z))
        if not hasattr(self, "maps"):
            return self.phi(z, t)
        letters = "bthk,nhk->nbthk" if self.maps.dim() == 3 else "bthk,nhkj->nbthj"
        y = wide(torch.einsum(letters, z.to(self.maps.dtype), self.maps)) + self.shift[:, None, None]  # one a map
        return self.phi(z, t, *y)


class PerHead(nn.Module):
    """W x + bias in float32, one number per head or dim per head: (B, T, width) -> (B, T, H, dim). W starts near 0.

    rank: W is W₂W₁ through so many; 0: x is W x already, (B, T, H, dim). start: the bias.
    """

    def __init__(self, mixer, dim=1, *, rank=None, start=0.0):
        super().__init__()
        last = nn.Linear(rank or mixer.width, mixer.heads * dim, bias=False)
        nn.init.normal_(last.weight, std=1e-3)
        first = [nn.Linear(mixer.width, rank, bias=False)] if rank else []
        self.w = nn.Identity() if rank == 0 else nn.Sequential(*first, last, nn.Unflatten(-1, (mixer.heads, dim)))
        self.bias = nn.Parameter(torch.full((mixer.heads, dim), start))

    def forward(self, x):
        return wide(self.w(x)) + self.bias


class Decay(PerHead):
    """log_decay = −rate · softplus(W x + bias), the learned decays of the grid: logsigmoid(z) = −softplus(−z).

    One per head or per channel, as mixer.decay says. rate: a constant, or None for exp(A_log) per head. cap: softplus
    reads cap · tanh(z / cap).
    """

    def __init__(self, mixer, *, rank=None, rate=None, cap=None):
        super().__init__(mixer, mixer.K if mixer.decay == "channel" else 1, rank=rank)
        self.constant, self.cap = rate, cap
        if rate is None:
            self.A_log = nn.Parameter(torch.zeros(mixer.heads, 1))

    def remember(self, half_life):
        """Set the bias to half-lives, (H,) in tokens: log_decay = −ln 2 / half_life where W x is 0."""
        z = torch.log(torch.expm1(math.log(2) / half_life / (self.constant or 1)))
        z = self.cap * torch.atanh((z / self.cap).clamp(-0.99, 0.99)) if self.cap else z
        self.bias.data[:] = z[:, None]

    def rate(self):
        return self.constant or self.A_log.exp()

    def step(self, x):
        """softplus(W x + bias), Mamba-2's dt."""
        z = super().forward(x)
        return F.softplus(self.cap * torch.tanh(z / self.cap) if self.cap else z)

    def forward(self, x):
        return -self.rate() * self.step(x)


def sliding_softmax(q, k, v, position, window, sinks, past):
    """Softmax over the last `window` tokens and the first `sinks` of the sequence: linear in T, constant state.

    q, k (B, T, H, K) rotated, v (B, T, H, V) -> Σ w and Σ w v (B, T, H, 1 + V), w = exp(q·k − the largest).
    Without the first tokens, where a pretrained softmax parks weight, it breaks down (arXiv 2309.17453). Queries come
    in N blocks of `rows`, each against the first tokens, the window before the block, and the block.
    """
    T, K, rows = q.size(1), q.size(-1), max(window, min(64, q.size(1)))
    q, kv = wide(q), wide(torch.cat([k, v], -1))
    blocks = lambda x: F.pad(x, (0, 0) * (x.dim() - 2) + (0, -T % rows)).unflatten(1, (-1, rows))
    head = torch.arange(sinks, device=q.device)
    first = (position[:, None] == head[:, None]).to(q.dtype)  # (B | 1, sinks, T)
    past.new["first"] = torch.einsum("bst,bthd->bshd", first, kv) + past.old.get("first", 0)
    kv = F.pad(past.carry("window", kv, window), (0, 0, 0, 0, 0, -T % rows)).unfold(1, window + rows, rows)
    first = past.new["first"].permute(0, 2, 3, 1)[:, None].expand(-1, kv.size(1), -1, -1, -1)
    kv = torch.cat([first, kv], -1)  # (B, N, H, K + V, sinks + window + rows)
    at = blocks(position)[..., None]  # (1 | B, N, rows, 1)
    back = window + torch.arange(rows, device=q.device)[:, None] - torch.arange(window + rows, device=q.device)
    near = (back >= 0) & (back < window) & ((back <= at) | (back == 0))  # padding reads itself: finite, never read
    seen = torch.cat([at - head >= window, near], -1)[:, :, None]  # a first token that is in the window counts once
    s = torch.einsum("bnihk,bnhkj->bnhij", blocks(q), kv[..., :K, :]) * K**-0.5
    s = s.masked_fill(~seen, -math.inf)
    w = (s - s.amax(-1, keepdim=True)).exp()
    o = torch.einsum("bnhij,bnhvj->bnihv", w, kv[..., K:, :])
    return torch.cat([w.sum(-1).mT.unsqueeze(-1), o], -1).flatten(1, 2)[:, :T]


# ------------------------------------------------------------------ the mixer around a cell

GATES = {"none": None, "silu": (F.silu, 1.278465), "sigmoid": (torch.sigmoid, 4.0)}  # bias: silu(1.2785) = 1
NORMS = {"none": lambda o, _: o, "rms": lambda o, dim: F.rms_norm(o, dim, eps=1e-5), "layer": F.layer_norm}
CHOICES = dict(feature=FEATURES, gate=GATES, norm=NORMS, blend=("add", "shared"))


class Heads(nn.Module):
    """What a teacher's attention and every mixer have: q, k, v, o, the teacher's biases, norms and rotary embedding."""

    def __init__(self, config, kv_heads, K, V):
        """kv_heads: how many of k and of v; K, V: channels of a head of q and k, and of v and what o reads."""
        super().__init__()
        self.width, self.heads, self.kv_heads, self.head_dim = config.width, config.heads, kv_heads, config.head_dim
        self.widths = K, K, V
        self.rotates, self.eps = bool(config.rope_base), getattr(config, "norm_eps", 1e-5)
        self.rotary = Rotary(self.head_dim, config.rope_base or 1e4, getattr(config, "rope_scaling", None))
        biases, sizes = getattr(config, "biases", ()), (self.heads * K, kv_heads * K, kv_heads * V)
        self.q, self.k, self.v = (nn.Linear(self.width, n, bias="qkv" in biases) for n in sizes)
        self.o = nn.Linear(self.heads * V, self.width, bias="o" in biases)
        if getattr(config, "head_norm", False):
            self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, self.eps) for _ in "qk")

    def projected(self, x):
        """x (B, T, width) -> q, k, v (B, T, heads, ≥ head_dim), of q and k the first head_dim channels normed."""
        q, k, v = (z(x).unflatten(-1, (-1, n)) for z, n in zip((self.q, self.k, self.v), self.widths))
        if hasattr(self, "q_norm"):
            D = self.head_dim
            q = torch.cat([self.q_norm(q[..., :D]), q[..., D:]], -1)
            k = torch.cat([self.k_norm(k[..., :D]), k[..., D:]], -1)
        return q, k, v

    def turned(self, z, position):
        """As the teacher does it."""
        return self.rotary(z, position) if self.rotates else z


class Mixer(Heads):
    """q, k, v projections -> short convolution -> φ -> the cell -> norm, gate -> output projection.

    A mixer is a subclass. Its first line is its row: `decay` and `write` as in the grid, and options that it sets or
    adds. `parts` makes its extra parameters (started near the teacher), `cell` turns (x, q, k, v) into the arguments of
    `scan` by name. A `Decay` called self.fade is applied and calibrated without more words.

    Options, the same for all: conv = taps of a causal depthwise convolution on q, k, v (0: none), identity at start;
    qk_norm = q and k brought to length 1; rope = rotate them; feature = φ of them, a key of FEATURES; denominator =
    divide by Σ φ(q)·φ(k), as softmax does; norm, gate = of each head's output, NORMS and GATES, the gate near 1 at
    start; expand_k, expand_v = keys and values so many times wider than the head. Hybrids: window = W > 0 adds softmax
    over the last W tokens and the first `sinks` ones at constant state: blend "add" sums both, the recurrence times a
    learned scale per head; "shared" gives each token to one of both, so that the recurrence is the one of W tokens ago,
    and divides by one denominator, as the code of LoLCATs does (arXiv 2410.10254).

    The papers have norm on. It is off here: a softmax head with nothing to say says 0, which a normed head cannot. Once
    `calibrate` has fitted the scales both start alike (results/starts.md).
    """

    decay, write, signed = "none", "add", False  # signed: its denominator may change sign
    options = dict(conv=4, qk_norm=False, rope=False, feature="none", denominator=False, norm="none", gate="none")
    options |= dict(expand_k=1, expand_v=1, window=0, sinks=4, blend="add")

    def __init_subclass__(cls, decay=None, write=None, signed=False, new=None, **options):
        """class M(Mixer, decay=…, write=…, option=…): what is not given is the parent's; new: options that it adds."""
        super().__init_subclass__()
        if unknown := options.keys() - cls.options:
            raise TypeError(f"{cls.__name__}: no option {', '.join(unknown)} to set; new=dict(NAME=VALUE) adds one")
        cls.decay, cls.write, cls.signed = decay or cls.decay, write or cls.write, signed or cls.signed
        cls.options = cls.options | options | (new or {})

    def __init__(self, config, **options):
        options = self.checked(options)
        H, D, K, V = config.heads, config.head_dim, options["expand_k"], options["expand_v"]
        if D % 2 and (options["rope"] or options["window"]):
            raise ValueError(f"head_dim {D}: rope and a window turn pairs of channels; wanted an even one")
        K, V = K * D, V * D
        super().__init__(config, H, K, V)
        vars(self).update(options)
        if self.conv:
            self.taps = nn.Parameter(F.pad(torch.ones(H * (2 * K + V), 1, 1, 1), (0, 0, self.conv - 1, 0)))
        self.K = K  # of the keys that the cell sees
        if self.feature != "none":
            self.phi = nn.ModuleDict({n: Feature(self.feature, H, K, getattr(config, "context", 2048)) for n in "qk"})
            self.K = self.phi["k"](torch.zeros(1, 1, H, K), torch.zeros(1, 1)).size(-1)
        if self.gate != "none":
            self.gate_proj = PerHead(self, V, start=GATES[self.gate][1])
        # what a head recalls is scaled by both: `calibrate` sets level (down to 1e-4, which one step of Adam would leap
        # over), training changes scale
        self.register_buffer("level", torch.full((H, 1), 0.1 if self.window else 1.0))
        self.scale = nn.Parameter(torch.ones(H, 1))
        self.parts()
        self.remember(16 * 32 ** torch.linspace(0, 1, H))  # some near and some far

    def checked(self, options):
        """-> all options with their values; ValueError names the first that cannot be."""
        if unknown := set(options) - set(self.options):
            raise ValueError(f"option {', '.join(sorted(unknown))}: wanted one of {', '.join(self.options)}")
        options = self.options | options
        for name, value in options.items():
            kind, least = type(self.options[name]), int(name.startswith("expand"))
            if not (value in list(CHOICES[name]) if name in CHOICES else type(value) is kind and value >= least):
                wanted = {int: f"a whole number from {least}", bool: "true or false"}.get(kind)
                raise ValueError(f"option {name} = {value!r}: wanted {wanted or ', '.join(CHOICES[name])}")
        positive = FEATURES[options["feature"]][1]
        if options["denominator"] and not (self.write == "add" and (positive or self.signed)):
            raise ValueError("option denominator = True: wanted added writes and a feature with φ(q)·φ(k) ≥ 0, as t2r")
        if options["blend"] == "shared" and not (options["window"] and options["denominator"] and positive):
            raise ValueError("option blend = 'shared': wanted a window, and a denominator as t2r and hedgehog have it")
        return options

    def parts(self):
        """Make the parameters of the cell."""

    def cell(self, x, q, k, v):
        """x (B, T, width), q, k (B, T, H, K), v (B, T, H, V) -> arguments of `scan` by name.

        One more, "now", (B, T, H, 1) or what expands to it: how much of the current value is added to the output.
        """
        return dict(q=q, k=k, v=v) | (dict(log_decay=self.fade(x)) if hasattr(self, "fade") else {})

    def remember(self, half_life):
        """Start with these half-lives, (H,) in tokens, if the cell has any to set; `calibrate` measures them."""
        if hasattr(self, "fade"):
            self.fade.remember(half_life)

    def forward(self, x, state=None, *, mask=None, form="auto"):
        """x (B, T, width) -> (y like x, state). mask (B, T) bool, False = padding, anywhere: it changes nothing.

        state: what came back for the tokens before x (None at the start); it holds S, the last inputs of the
        convolution, the window and the position, and its size does not grow.
        """
        wrong = mask is not None and (mask.dtype, mask.shape) != (torch.bool, x.shape[:2])
        if wrong or x.dim() != 3 or 0 in x.shape:
            got = (*x.shape,), None if mask is None else (mask.dtype, (*mask.shape,))
            raise ValueError(f"x, mask: wanted (B, T, {self.width}), none of them 0, and booleans (B, T), got {got}")
        if mask is None:
            past = Past(state)
            return self.mix(x, past, form), past.new
        order = (~mask).int().argsort(dim=1, stable=True)  # padding to the end; work; every row back in its place
        past = Past(state, take(mask, order))
        y = self.mix(take(x, order).masked_fill(~past.mask[..., None], 0), past, form)
        return take(y, order.argsort(1)), past.new

    def mix(self, x, past, form):
        """`forward` with the padding, if any, at the end; fills past.new."""
        return self.o(self.read(*self.streams(x, past), past, form, x).flatten(2))

    def streams(self, x, past):
        """-> (position, [q, k, v] of the head as projected, what the cell makes of x: arguments of `scan` by name)."""
        position, parts = past.positions(x), self.projected(x)
        plain = [z[..., : self.head_dim] for z in parts]
        q, k, v = self.convolve(parts, past)
        q, k = (unit(z) if self.qk_norm else z for z in (q, k))
        early = self.rope and self.denominator  # φ ≥ 0 stays so: rotated before it
        q, k = (self.rotary(z, position) if early else z for z in (q, k))
        if self.feature != "none":
            q, k = self.phi["q"](q, position), self.phi["k"](k, position)
        c = self.cell(x, q, k, v)
        if self.rope and not early:
            c |= {name: self.rotary(c[name], position) for name in ("q", "k", "erase") if name in c}
        c["q"] = c["q"] * self.head_dim**-0.5
        return position, plain, c

    def convolve(self, parts, past):
        """Causal depthwise convolution over q, k and v; the last conv − 1 inputs are its state."""
        if not self.conv:
            return parts
        z = past.carry("tail", torch.cat([part.flatten(2) for part in parts], -1), self.conv - 1)
        y = F.conv2d(z.mT.unsqueeze(-1), self.taps, groups=z.size(-1))  # a channels-last image of width 1: no copies
        parts = y.squeeze(-1).mT.split([self.heads * n for n in self.widths], -1)
        return [part.unflatten(-1, (-1, n)) for part, n in zip(parts, self.widths)]

    def read(self, position, plain, c, past, form="auto", x=None):
        """-> o (B, T, H, V): what the recurrence recalls, normed and gated if x is given, and what the window sees."""
        now, v, scale, shared = c.pop("now", None), c["v"], self.level * self.scale, self.blend == "shared"
        if self.denominator:
            c["v"] = F.pad(wide(v), (1, 0), value=1.0)  # the column of ones sums the weights
        if shared:  # the recurrence meets a token when the window has passed it, a first one never
            c["k"] = c["k"] * (position >= self.sinks)[..., None, None]
            for name in c.keys() & {"k", "v", "log_decay"}:
                c[name] = past.carry(f"late {name}", c[name], self.window)[:, : v.size(1)]
        if past.mask is not None:  # a zero key writes nothing, a zero log_decay forgets nothing
            c |= {name: c[name] * past.mask[..., None, None] for name in ("k", "erase", "log_decay") if name in c}
        o, past.new["S"] = scan(**c, S=past.old.get("S"), form=form)
        if self.window:
            q, k = (self.turned(z, position) for z in plain[:2])
            seen = sliding_softmax(q, k, plain[2], position, self.window, self.sinks, past)
            seen = F.pad(seen, (0, v.size(-1) - plain[2].size(-1)))  # nothing in values that are wider than the head
        if shared:
            o = seen + scale.abs() * o
        if self.denominator:
            o = o[..., 1:] / o[..., :1].abs().clamp(min=1.0 if self.signed else 1e-6)
        o = (o if now is None else o + now * v).to(v.dtype)
        if x is not None:
            o = NORMS[self.norm](o, o.shape[-1:])
            o = o if self.gate == "none" else o * GATES[self.gate][0](self.gate_proj(x)).to(o.dtype)
        if shared:
            return o
        o = o * scale.to(v.dtype)
        return o + (seen[..., 1:] / seen[..., :1]).to(v.dtype) if self.window else o

    def matrix(self, x):
        """The token-mixing matrix, x (B, T, width) -> (B, H, T, T): o = matrix · v before norm and gate."""
        position, plain, c = self.streams(x, Past())
        ones = torch.eye(x.size(1), dtype=c["q"].dtype, device=x.device)
        plain[2] = c["v"] = ones[None, :, None].expand(len(x), -1, self.heads, -1)
        return self.read(position, plain, c, Past()).transpose(1, 2)

    @torch.no_grad()
    def state_size(self, T=1):
        """Floats that one layer carries per sequence while decoding; but for softmax, the same for every T."""
        state = self(self.q.weight.new_zeros(1, 1, self.width))[1]
        return sum(z.numel() for z in state.values() if z.is_floating_point())


# ------------------------------------------------------------------ the mixers

MIXERS = {}


def register(cls):
    """Enter a mixer in MIXERS under its class name in lower case: --mixer, the tests and the tables read it there."""
    MIXERS[cls.__name__.lower()] = cls
    return cls


def build(name, config, **options):
    """MIXERS[name] for one layer of `config`: width, heads, kv_heads, head_dim, rope_base, and what Heads may read."""
    if name not in MIXERS:
        raise ValueError(f"mixer {name!r}: wanted one of {', '.join(MIXERS)}")
    return MIXERS[name](config, **options)


@register
class Softmax(Mixer, decay="softmax", write="softmax"):
    """The teacher's row: causal softmax attention, rotary, with shared key heads (arXiv 1706.03762).

    Its state grows with T. Of Mixer it takes `forward`.
    """

    def __init__(self, config, **options):
        if options:
            raise ValueError(f"mixer 'softmax' takes no options, got {', '.join(options)}")
        Heads.__init__(self, config, config.kv_heads, config.head_dim, config.head_dim)
        self.sliding = getattr(config, "sliding", 0)

    def streams(self, x, past):
        """-> position, q (B, T, H, K), k, v (B, T, kv heads, K)."""
        position, (q, k, v) = past.positions(x), self.projected(x)
        return position, self.turned(q, position), self.turned(k, position), v

    def seen(self, rows, columns):
        """Which columns each row may look at, by the positions of both: (B | 1, T), (B | 1, n) -> (B | 1, T, n)."""
        back, real = rows[..., None] - columns[:, None], columns[:, None] >= 0
        return (back >= 0) & (back < (self.sliding or math.inf)) & (real | (back == 0))  # padding reads padding

    def mix(self, x, past, form):
        position, q, k, v = self.streams(x, past)
        for name, z in (("k", k), ("v", v), ("at", position.expand(len(x), -1))):
            past.new[name] = torch.cat([past.old[name].to(z.dtype), z], 1) if past.old else z
        allowed = None
        if past.old or past.mask is not None or 0 < self.sliding < x.size(1):
            allowed = self.seen(position, past.new["at"])[:, None]
        q, k, v = (z.transpose(1, 2) for z in (q, past.new["k"], past.new["v"]))
        if x.size(1) == 1:  # the query heads of a key head as rows of one: bf16 on a CPU takes a quarter of the time
            q = q.unflatten(1, (self.kv_heads, -1)).squeeze(3)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None, enable_gqa=True)
        o = o.flatten(1, 2).unsqueeze(1) if x.size(1) == 1 else o.transpose(1, 2)  # (B, T, H, V)
        return self.o(o.flatten(2))

    def matrix(self, x):
        position, q, k, _ = self.streams(x, Past())
        k = k.repeat_interleave(self.heads // self.kv_heads, 2)
        A = torch.einsum("bihk,bjhk->bhij", q, k) * self.head_dim**-0.5
        return A.masked_fill(~self.seen(position, position)[:, None], -math.inf).softmax(-1)

    def state_size(self, T=1):
        """Floats per layer and sequence after T tokens: the KV cache."""
        return 2 * T * self.kv_heads * self.head_dim


@register
class Linear(Mixer, feature="hadamard"):
    """No decay, added writes, no denominator; φ(z) = (Az + a) ⊙ (Bz + b) or another feature (arXiv 2504.14366)."""

    def parts(self):
        self.level.fill_(1 / 64)  # a sum of some hundred tokens starts of order 1


@register
class T2R(Mixer, feature="t2r", denominator=True):
    """φ(z) = relu(W z + b), with a denominator (arXiv 2103.13076)."""


@register
class Hedgehog(Mixer, feature="hedgehog", denominator=True):
    """φ(z) = [softmax(W z), softmax(−W z)], with a denominator (arXiv 2402.04347)."""


@register
class ReBased(Mixer, feature="rebased", denominator=True):
    """φ(z) = (γ · LayerNorm(z) + β)², by channel, with a denominator (arXiv 2402.10644).

    The released code squares q·k instead, the same but for the products of two channels, at a state of K² rows.
    """


@register
class Based(Mixer, feature="taylor", denominator=True):
    """φ(q)·φ(k) = 1 + s + s²/2, s a product in 16 dimensions, with a denominator (arXiv 2402.18668)."""


@register
class RetNet(Mixer, decay="head", rope=True, gate="silu"):
    """Fixed decay γ_h = 1 − 2^(−5−h) per head, rotary q and k, gated (arXiv 2307.08621 eq. 8)."""

    def parts(self):
        self.register_buffer("log_decay", torch.log1p(-(2.0 ** (-5 - torch.arange(self.heads))))[:, None])

    def cell(self, x, q, k, v):
        return dict(q=q, k=k, v=v, log_decay=self.log_decay.expand(*k.shape[:3], 1))


@register
class SUPRA(RetNet, feature="t2r", gate="none"):
    """φ = relu(W z + b), rotated after it, fixed decay exp(−2^(−8(h+1)/H)) per head (arXiv 2405.06640)."""

    def parts(self):
        slope = 2.0 ** (-8 * (torch.arange(self.heads) + 1) / self.heads)
        self.register_buffer("log_decay", -slope[:, None])


@register
class Mamba2(Mixer, decay="head", gate="silu", new=dict(discrete=False)):
    """Keys times dt = softplus(w x + b), decay exp(−exp(A_log) dt) per head, skip D, gated (arXiv 2405.21060).

    Option discrete: no dt on the keys and no A_log, as in Llamba (arXiv 2502.14458).
    """

    def parts(self):
        self.fade = Decay(self, rate=1 if self.discrete else None)
        self.skip = nn.Parameter(torch.zeros(self.heads, 1))

    def cell(self, x, q, k, v):
        dt = self.fade.step(x)
        return dict(q=q, k=k if self.discrete else k * dt, v=v, log_decay=-self.fade.rate() * dt, now=self.skip)


@register
class XLSTM(Mixer, decay="head", signed=True, denominator=True, gate="sigmoid", qk_norm=True):
    """mLSTM: keys times exp(i), decay sigmoid(−f), both capped; o over max(|denominator|, 1) (arXiv 2405.04517 eq. 19).

    The cap (2503.13427) keeps exp(i) finite; the running maximum that stabilises the uncapped form cancels out. q and k
    start at length 1, so that the denominator starts below 1: with a teacher's lengths it changes sign and training
    breaks down (20k tokens took KL from 2.75 to 6.27).
    """

    def parts(self):
        self.fade, self.input = Decay(self, rate=1, cap=15), PerHead(self)

    def cell(self, x, q, k, v):
        return super().cell(x, q, k * torch.exp(15 * torch.tanh(self.input(x) / 15)), v)


@register
class GLA(Mixer, decay="channel", gate="silu"):
    """Decay per channel, sigmoid(−W₂ W₁ x − b)^(1/16) at rank 16, gated (arXiv 2312.06635)."""

    def parts(self):
        self.fade = Decay(self, rank=16, rate=1 / 16)


@register
class DFW(Mixer, decay="channel"):
    """Decaying fast weights: decay sigmoid(−W x − b) per channel of the keys, full rank (arXiv 2210.04243).

    The authors' code has a second decay, per channel of the values, which does not fit the grid.
    """

    def parts(self):
        self.fade = Decay(self, rate=1)


@register
class MetaLA(Mixer, decay="channel", gate="silu"):
    """The key is what the decay leaves, k = 1 − α, α = sigmoid(−W_k x − b)^(1/16); W_k, the teacher's, makes the decay.

    The current token is added again by q·(w ⊙ k), w from 0 (arXiv 2411.10741; the authors' code puts a sigmoid around
    that product with v, and o is no longer linear in v). Its half-lives are as told only where W_k x is 0.
    """

    def parts(self):
        self.fade = Decay(self, rank=0, rate=1 / 16)
        self.again = nn.Parameter(torch.zeros(self.heads, self.K))

    def cell(self, x, q, k, v):
        log_decay = self.fade(k)
        k = -torch.expm1(log_decay)
        return dict(q=q, k=k, v=v, log_decay=log_decay, now=(q * self.again * k).sum(-1, keepdim=True))


@register
class HGRN2(Mixer, decay="channel"):
    """k = 1 − α, α = γ + (1 − γ) sigmoid(−W_k x − b), the bound γ learned from near 0 (arXiv 2404.07904).

    Theirs are one γ a layer, growing with depth, and a SiLU on q.
    """

    def parts(self):
        self.fade = Decay(self, rank=0, rate=1)
        self.bound = nn.Parameter(torch.full((self.heads, self.K), -6.0))  # γ = sigmoid(bound)

    def cell(self, x, q, k, v):
        log_decay = torch.logaddexp(F.logsigmoid(self.bound), F.logsigmoid(-self.bound) + self.fade(k))
        return dict(q=q, k=-torch.expm1(log_decay), v=v, log_decay=log_decay)


@register
class Delta(Mixer, write="delta", new=dict(negative=False)):
    """Each write first erases what its unit key already recalls, by β = σ(w x) (arXiv 2406.06484).

    Option negative: β = 2 σ(w x), so that S may flip along a key (arXiv 2411.12537).
    """

    def parts(self):
        start = 0.125 if self.negative else 0.25  # β = ¼, the nearest start (results/starts.md)
        self.beta = PerHead(self, start=math.log(start / (1 - start)))

    def cell(self, x, q, k, v):
        beta = torch.sigmoid(self.beta(x)) * (2 if self.negative else 1)
        return super().cell(x, unit(q), unit(k), v) | dict(beta=beta)


@register
class Gated_Delta(Delta, decay="head", gate="silu"):
    """delta, and all of S fades by exp(−exp(A_log) · softplus(w x + b)) per head (arXiv 2412.06464 eq. 10)."""

    def parts(self):
        super().parts()
        self.fade = Decay(self)


@register
class KDA(Gated_Delta, decay="channel", gate="sigmoid"):
    """gated_delta with a decay per channel at rank head_dim; sigmoid gate after the norm (arXiv 2510.26692)."""

    def parts(self):
        Delta.parts(self)
        self.fade = Decay(self, rank=self.head_dim)


@register
class RWKV7(Mixer, decay="channel", write="own key", gate="sigmoid"):
    """S_t = w ⊙ S_{t-1} − (a ⊙ κ) ⊗ S_{t-1}ᵀκ + k̃ ⊗ v, κ = unit(ξ ⊙ k), k̃ = k ⊙ (1 + (a − 1) ⊙ α) (arXiv 2503.14456).

    It erases at κ what S held *before* the decay; `erase` reads after it, hence κ / w below, w = exp(−exp(−½) σ(…)) ≥
    0.545. With one w and one a per head and ξ = α = 1 this is S_t = w S_{t-1} + κ ⊗ a (v − S_{t-1}ᵀκ), gated_delta but
    for that order. q and k have length 1 here. The token shift and the first layer's values are left out.
    """

    def parts(self):
        H, K = self.heads, self.K
        self.w, self.a = (PerHead(self, K, rank=self.head_dim, start=math.log(0.25 / 0.75)) for _ in range(2))
        self.xi, self.alpha, self.bonus = (nn.Parameter(torch.full((H, K), z)) for z in (1.0, 1.0, 0.0))

    def remember(self, half_life):
        self.w.bias.data[:] = torch.logit((math.log(2) / half_life * math.exp(0.5)).clamp(max=0.99))[:, None]

    def cell(self, x, q, k, v):
        q, k, log_decay, a = unit(q), unit(k), -math.exp(-0.5) * torch.sigmoid(self.w(x)), torch.sigmoid(self.a(x))
        kappa, k = unit(k * self.xi), k * (1 + (a - 1) * self.alpha)
        now = (q * self.bonus * k).sum(-1, keepdim=True)
        erase = torch.stack([kappa * (-log_decay).exp(), a * kappa])
        return dict(q=q, k=k, v=v, log_decay=log_decay, erase=erase, now=now)


# ------------------------------------------------------------------ python mixers.py


def main():
    """The table of mixers, or with --picture what each of them sees."""
    from evaluate import draw_mixers, print_mixers
    from surgery import Parser

    parser = Parser(description="The grid of mixers: what each one costs and sees.", allow_abbrev=False)
    parser.add_argument("--picture", metavar="OUT.png", help="draw the teacher's attention and each mixer's matrix")
    parser.add_argument("--teacher", default="140m", help="whose attention to draw (default 140m)")
    args = parser.parse_args()
    torch.manual_seed(0)
    draw_mixers(args.picture, args.teacher) if args.picture else print_mixers()


if __name__ == "__main__":
    from surgery import cli

    cli(main)
