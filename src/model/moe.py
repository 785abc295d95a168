"""A layer of experts: a router sends each token through a few of many feed-forward layers. No token is dropped.

Tensor letters: src/model/spec.py. A token goes through k experts, so M = B T k.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from src.model.context import Context
from src.model.feedforward import FeedForward, activated
from src.model.spec import ExpertsSpec
from src.model.weights import Statistic, Tree, grouped_matmul, matmul, weight

Report = dict[str, jax.Array]


class Experts(nnx.Module):
    """E feed-forward layers of which a token goes through those its router scores highest (Shazeer et al. 2017)."""

    def __init__(self, spec: ExpertsSpec, emb_dim: int, out_scale: float, dtype: str, rngs: nnx.Rngs) -> None:
        self.spec = spec
        E, A, F = spec.count, len(spec.expert.activations), spec.expert.mlp_dim
        self.router = weight(rngs, (emb_dim, E), ("embed", None), dtype, fan_in=(0,))
        if spec.router_bias:
            self.router_bias = weight(rngs, (E,), (None,), dtype, constant=0.0, decays=False)
        if spec.correction_bias:
            self.correction_bias = Statistic(jnp.zeros(E), out_sharding=(None,), fan_in=(), decays=False)
        self.wi = weight(rngs, (E, emb_dim, A, F), ("expert", "expert_embed", None, "mlp"), dtype, fan_in=(1,))
        self.wo = weight(rngs, (E, F, emb_dim), ("expert", "mlp", "expert_embed"), dtype, fan_in=(1,), scale=out_scale)
        if spec.expert.bias:
            self.wi_bias = weight(rngs, (E, A, F), ("expert", None, "mlp"), dtype, constant=0.0, decays=False)
            self.wo_bias = weight(rngs, (E, emb_dim), ("expert", None), dtype, constant=0.0, decays=False)
        if spec.shared:
            self.shared = FeedForward(spec.shared, emb_dim, out_scale, dtype, rngs)

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, Report]:
        """[B, T, D] to [B, T, D], and of this batch: `expert_load` [E] and `load_balance_loss`."""
        B, T, D = x_BTD.shape
        scores_BTE = self._scores(x_BTD)
        experts_BTk, weights_BTk = self._choose(scores_BTE)
        out_BTD = self._run(x_BTD.reshape(B * T, D), experts_BTk, weights_BTk).reshape(B, T, D)
        out_BTD = context.layout.constrain(out_BTD, "batch", "length", "activation_embed")
        if self.spec.shared:
            out_BTD += self.shared(x_BTD, context)[0]
        return checkpoint_name(out_BTD, "mlpwo"), self._report(scores_BTE, experts_BTk, context.segment_ids_BT > 0)

    def _scores(self, x_BTD: jax.Array) -> jax.Array:
        """Each expert's score, in float32: a choice between two close ones must not hang on rounding."""
        logits_BTE = matmul(x_BTD.astype(jnp.float32), self.router[...], "BTD,DE->BTE", precision="highest")
        if self.spec.router_bias:
            logits_BTE += self.router_bias[...].astype(jnp.float32)
        return {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[self.spec.score_func](logits_BTE)

    def _choose(self, scores_BTE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The k experts of each token, and their weights; both [B, T, k]."""
        spec, choice_BTE = self.spec, scores_BTE
        if spec.correction_bias:  # it moves the choice and not the weights (DeepSeek-V3, arXiv:2412.19437, 2.1.2)
            choice_BTE = choice_BTE + jax.lax.stop_gradient(self.correction_bias[...])
        if spec.groups > 1:
            choice_BTE = jnp.where(self._in_best_groups(choice_BTE), choice_BTE, -jnp.inf)
        _, experts_BTk = jax.lax.top_k(choice_BTE, spec.per_token)
        weights_BTk = jnp.take_along_axis(scores_BTE, experts_BTk, axis=-1)
        if spec.normalise:
            weights_BTk /= jnp.sum(weights_BTk, axis=-1, keepdims=True) + 1e-20
        return experts_BTk, weights_BTk * spec.scaling

    def _in_best_groups(self, choice_BTE: jax.Array) -> jax.Array:
        """Whether each expert is in one of its token's best groups (DeepSeek-V2, section 2.2.2)."""
        spec = self.spec
        grouped_BTGe = choice_BTE.reshape(*choice_BTE.shape[:2], spec.groups, -1)
        best = {"max": 1, "top2": 2}[spec.group_score]
        group_BTG = jnp.sum(jax.lax.top_k(grouped_BTGe, best)[0], axis=-1)
        _, chosen_BTg = jax.lax.top_k(group_BTG, spec.groups_per_token)
        chosen_BTG = jnp.any(jax.nn.one_hot(chosen_BTg, spec.groups, dtype=bool), axis=-2)
        return jnp.repeat(chosen_BTG, grouped_BTGe.shape[-1], axis=-1)

    def _run(self, x_XD: jax.Array, experts_BTk: jax.Array, weights_BTk: jax.Array) -> jax.Array:
        """The weighted sum of each token's experts: X = B T tokens, [X, D] to [X, D].

        Tokens are sorted by expert, so that each expert multiplies one block of rows.
        """
        spec, per_token = self.spec, self.spec.per_token
        expert_M, weight_M1 = experts_BTk.reshape(-1), weights_BTk.reshape(-1, 1).astype(x_XD.dtype)
        order_M = jnp.argsort(expert_M)
        sorted_expert_M, sorted_weight_M1 = expert_M[order_M], weight_M1[order_M]
        rows_E = jnp.bincount(expert_M, length=spec.count).astype(jnp.int32)
        x_MD = x_XD[order_M // per_token]
        if spec.scale_inputs:
            x_MD = x_MD * sorted_weight_M1
        hidden_MAF = grouped_matmul(x_MD, self.wi[...], rows_E)
        if spec.expert.bias:
            hidden_MAF += self.wi_bias[...].astype(x_MD.dtype)[sorted_expert_M]
        hidden_MAF = checkpoint_name(hidden_MAF, "mlpwi")
        out_MD = grouped_matmul(activated(hidden_MAF, spec.expert), self.wo[...], rows_E)
        if spec.expert.bias:
            out_MD += self.wo_bias[...].astype(x_MD.dtype)[sorted_expert_M]
        if not spec.scale_inputs:
            out_MD = out_MD * sorted_weight_M1
        unsorted_MD = out_MD[jnp.argsort(order_M)]
        return jnp.sum(unsorted_MD.reshape(-1, per_token, out_MD.shape[-1]), axis=1)

    def _report(self, scores_BTE: jax.Array, experts_BTk: jax.Array, real_BT: jax.Array) -> Report:
        """The fraction of choices that fell on each expert, and the load-balance loss, of tokens that are no padding.

        The loss is E times the sum over experts of that fraction and the mean score, 1 when all is even (Switch
        Transformer, arXiv:2101.03961, section 2.2).
        """
        E = self.spec.count
        tokens = jnp.maximum(jnp.sum(real_BT), 1)
        chosen_BTE = jnp.sum(jax.nn.one_hot(experts_BTk, E), axis=-2) / self.spec.per_token
        shares_BTE = scores_BTE / jnp.sum(scores_BTE, axis=-1, keepdims=True)
        load_E = jnp.sum(chosen_BTE * real_BT[..., None], axis=(0, 1)) / tokens
        share_E = jnp.sum(shares_BTE * real_BT[..., None], axis=(0, 1)) / tokens
        return {"expert_load": load_E, "load_balance_loss": E * jnp.sum(load_E * share_E)}


def corrected(stats: Tree, reports: Tree, rate: float) -> Tree:
    """The correction biases `stats`, each `rate` nearer to an even load (DeepSeek-V3, section 2.1.2).

    `reports` is nested as they are, with the `expert_load` of each.
    """

    def move(bias_E: jax.Array, load_E: jax.Array) -> jax.Array:
        # Layers that share their weights, and so the bias, report one by one.
        load_E = jnp.mean(load_E, axis=tuple(range(load_E.ndim - bias_E.ndim)))
        return bias_E + rate * jnp.sign(1.0 / bias_E.shape[-1] - load_E)

    return {
        name: move(stat, reports["expert_load"]) if name == "correction_bias" else corrected(stat, reports[name], rate)
        for name, stat in stats.items()
    }


def total(reports: Tree, name: str) -> jax.Array:
    """The sum of one reported value over all layers; 0 where none reports it."""
    leaves = jax.tree_util.tree_leaves_with_path(reports)
    values = [jnp.sum(leaf) for path, leaf in leaves if jax.tree_util.keystr(path[-1:], simple=True) == name]
    return sum(values, jnp.zeros((), jnp.float32))
