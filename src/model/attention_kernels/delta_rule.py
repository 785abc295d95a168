"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464): chunked for a sequence, and one step for decoding.

A value head has a state S [H, P]. A token decays it, and then moves the value stored at its key towards its own value:

S = exp(g) S; S = S + k beta (v - k S); out = q S

Letters in addition to those in src/model/spec.py: K key heads, each with G value heads, H size of queries and keys, P
of values, C tokens of a chunk, n chunks. All arrays are float32, but TPUs and GPUs round the inputs of matmuls as
`matmul_precision` says, except in the inverse, where each round would add to the errors of earlier ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from src.model.matmul import with_gradient

CHUNK = 64


def in_chunks(
    q_BTKH: Array, k_BTKH: Array, v_BTKGP: Array, g_BTKG: Array, beta_BTKG: Array, documents_BT: Array, S_BKGHP: Array
) -> tuple[Array, Array]:
    """Runs the rule over sequences: outputs [B, T, K, G, P], and the states after the last token.

    `S_BKGHP` must be zeros. Each document of a sequence begins with a state of zeros; `documents_BT` are rising numbers
    that identify documents. The matmuls within a chunk follow section 3.3 of the paper; a scan over chunks passes the
    states on.
    """
    T = q_BTKH.shape[1]
    C = min(CHUNK, T)

    def chunks(x_BT: Array, heads: int = 0) -> Array:
        """Cuts [B, T, heads..., ...] to [n, B, heads..., C, ...], padded with tokens that neither decay nor write."""
        mode = "constant" if heads else "edge"
        x_BT = jnp.pad(x_BT, ((0, 0), (0, -T % C), *[(0, 0)] * (x_BT.ndim - 2)), mode=mode)
        x_nBC = jnp.moveaxis(x_BT.reshape(x_BT.shape[0], -1, C, *x_BT.shape[2:]), 1, 0)
        return jnp.moveaxis(x_nBC, 2, 2 + heads)

    documents_nBC = chunks(documents_BT)
    q_nBKCH, k_nBKCH, v_nBKGCP = chunks(q_BTKH, 1), chunks(k_BTKH, 1), chunks(v_BTKGP, 2)
    g_nBKGC, beta_nBKGC = chunks(g_BTKG, 2), chunks(beta_BTKG, 2)
    before_nB1 = jnp.concatenate([documents_nBC[:1, :, :1], documents_nBC[:-1, :, -1:]])
    # For each token: is it in the document that the previous chunk ended in, and in the one that this chunk ends in?
    carried_nBC, last_nBC = documents_nBC == before_nB1, documents_nBC == documents_nBC[..., -1:]
    same_nBCc = documents_nBC[..., None] == documents_nBC[..., None, :]
    # Sums of log-decays between each pair of tokens: subtracting prefix sums would lose digits if a token decays
    # strongly.
    decay_nBKGCc = jnp.cumsum(jnp.where(np.tri(C, k=-1, dtype=bool), g_nBKGC[..., None], 0.0), axis=-2)
    within_nBKGCc = _exp_where(same_nBCc & np.tri(C, dtype=bool), decay_nBKGCc)
    from_start_nBKGC = _exp_where(carried_nBC, jnp.cumsum(g_nBKGC, axis=-1))
    to_end_nBKGC = _exp_where(last_nBC, decay_nBKGCc[..., -1, :])

    keys_nBKCc = jnp.einsum("nBKCH,nBKcH->nBKCc", k_nBKCH, k_nBKCH)
    mixed_nBKGCc = keys_nBKCc[:, :, :, None] * within_nBKGCc * beta_nBKGC[..., None]
    solved_nBKGCc = _invert(jnp.where(np.tri(C, k=-1, dtype=bool), mixed_nBKGCc, 0.0))
    # What tokens write given a zero initial state, then the correction that depends on the chunk's initial state.
    written_nBKGCP = jnp.einsum("nBKGCc,nBKGcP->nBKGCP", solved_nBKGCc, v_nBKGCP * beta_nBKGC[..., None])
    solved_nBKGCc *= (beta_nBKGC * from_start_nBKGC)[..., None, :]
    read_nBKGCH = jnp.einsum("nBKGCc,nBKcH->nBKGCH", solved_nBKGCc, k_nBKCH)
    scores_nBKGCc = jnp.einsum("nBKCH,nBKcH->nBKCc", q_nBKCH, k_nBKCH)[:, :, :, None] * within_nBKGCc

    def run_chunk(S_BKGHP: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q_BKCH, k_BKCH, written_BKGCP, read_BKGCH, scores_BKGCc, from_start_BKGC, to_end_BKGC = chunk
        new_BKGCP = written_BKGCP - jnp.einsum("BKGCH,BKGHP->BKGCP", read_BKGCH, S_BKGHP)
        past_BKGCP = jnp.einsum("BKCH,BKGHP->BKGCP", q_BKCH, S_BKGHP) * from_start_BKGC[..., None]
        out_BKGCP = past_BKGCP + jnp.einsum("BKGCc,BKGcP->BKGCP", scores_BKGCc, new_BKGCP)
        added_BKGHP = jnp.einsum("BKCH,BKGCP->BKGHP", k_BKCH, new_BKGCP * to_end_BKGC[..., None])
        return S_BKGHP * from_start_BKGC[..., -1, None, None] + added_BKGHP, out_BKGCP

    of_chunks = (q_nBKCH, k_nBKCH, written_nBKGCP, read_nBKGCH, scores_nBKGCc, from_start_nBKGC, to_end_nBKGC)
    S_BKGHP, out_nBKGCP = jax.lax.scan(run_chunk, S_BKGHP, of_chunks)
    out_BnCKGP = jnp.moveaxis(out_nBKGCP, (0, 4), (1, 2))
    return out_BnCKGP.reshape(out_BnCKGP.shape[0], -1, *out_BnCKGP.shape[3:])[:, :T], S_BKGHP


def one_token(
    q_BKH: Array, k_BKH: Array, v_BKGP: Array, g_BKG: Array, beta_BKG: Array, S_BKGHP: Array
) -> tuple[Array, Array]:
    """Advances the states by one token: its output [B, K, G, P], and the new states."""
    S_BKGHP = S_BKGHP * jnp.exp(g_BKG)[..., None, None]
    new_BKGP = (v_BKGP - jnp.einsum("BKH,BKGHP->BKGP", k_BKH, S_BKGHP)) * beta_BKG[..., None]
    S_BKGHP += jnp.einsum("BKH,BKGP->BKGHP", k_BKH, new_BKGP)
    return jnp.einsum("BKH,BKGHP->BKGP", q_BKH, S_BKGHP), S_BKGHP


def _exp_where(mask_nB: Array, x_nBKG: Array) -> Array:
    """Masked exponential: exp(x), or 0 if the mask (without head dims) is false, even if exp(x) is infinite."""
    return jnp.exp(jnp.where(mask_nB[:, :, None, None], x_nBKG, -jnp.inf))


def _inverse_of_unit_lower(lower: Array) -> Array:
    """Inverts I + lower, for strictly lower triangular matrices [..., C, C].

    Inverses of diagonal blocks are combined into inverses of blocks twice as large: log2(C) rounds of matmuls, compared
    to C steps of substitution. A series in powers of `lower` needs as many rounds but overflows if keys are alike.
    """
    C = lower.shape[-1]
    block, inverse = np.arange(C), jnp.broadcast_to(jnp.eye(C, dtype=lower.dtype), lower.shape)
    while block[-1]:
        joins = (block[:, None] % 2 == 1) & (block[:, None] - 1 == block)
        joined = jnp.matmul(inverse, jnp.where(joins, lower, 0.0), precision="highest")
        inverse, block = inverse - jnp.matmul(joined, inverse, precision="highest"), block // 2
    return inverse


def _inverse_gradient(inverse: Array, gradient: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.matmul(jnp.matmul(transposed, gradient, precision="highest"), transposed, precision="highest"),)


_invert = with_gradient(lambda lower: (_inverse_of_unit_lower(lower),) * 2, _inverse_gradient)
