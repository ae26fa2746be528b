"""One step of training as a compiled function of a plain tree of arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lm_config import ModelConfig, Recipe
from lm_mesh import ROWS, parameter_shardings, put_batch
from lm_model import Transformer, rebuild

Array = Any
Tree = Any
"""{"parameters": ..., "optimizer": ..., "step": ...}: what a checkpoint holds."""


@dataclass(frozen=True)
class Trainer:
    """The compiled functions of one configuration on one mesh.

    `step` takes a tree (whose memory it reuses: donation) and a batch of windows of tokens, and
    gives the tree after it with the loss before it; `evaluate` gives the loss alone.
    """

    config: ModelConfig
    recipe: Recipe
    mesh: Any
    abstract: Tree  # the shapes, types and places of what `step` takes, for a checkpoint
    initial: Callable[[], Tree]
    step: Callable[[Tree, Array, Array], tuple[Tree, Array]]
    evaluate: Callable[[Tree, Array, Array], Array]

    def put(self, windows: np.ndarray[Any, Any]) -> tuple[Array, Array]:
        """Inputs and targets on the mesh: tokens, and those that come one later."""
        return put_batch(self.mesh, windows[:, :-1]), put_batch(self.mesh, windows[:, 1:])


def make_trainer(config: ModelConfig, recipe: Recipe, mesh: Any, remat: str = "none") -> Trainer:
    """Compiles nothing yet: each function does so at its first call."""
    optimizer = make_optimizer(recipe)
    model = rebuild(lambda: Transformer(config, nnx.Rngs(0), mesh, remat))

    def initial() -> Tree:
        made = Transformer(config, nnx.Rngs(recipe.seed), mesh, remat)
        parameters = nnx.to_pure_dict(nnx.state(made))
        return {
            "parameters": parameters,
            "optimizer": optimizer.init(parameters),
            "step": jnp.zeros((), jnp.int32),
        }

    def loss(parameters: Tree, inputs: Array, targets: Array) -> Array:
        return cross_entropy(model(parameters)(inputs), targets)

    def step(tree: Tree, inputs: Array, targets: Array) -> tuple[Tree, Array]:
        value, gradient = jax.value_and_grad(loss)(tree["parameters"], inputs, targets)
        updates, state = optimizer.update(gradient, tree["optimizer"], tree["parameters"])
        parameters = optax.apply_updates(tree["parameters"], updates)
        return {"parameters": parameters, "optimizer": state, "step": tree["step"] + 1}, value

    shapes = jax.eval_shape(initial)
    shardings = parameter_shardings(mesh, shapes)
    rows, whole = NamedSharding(mesh, ROWS), NamedSharding(mesh, P())
    return Trainer(
        config=config,
        recipe=recipe,
        mesh=mesh,
        abstract=jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        ),
        initial=jax.jit(initial, out_shardings=shardings),
        step=jax.jit(
            step,
            in_shardings=(shardings, rows, rows),
            out_shardings=(shardings, whole),
            donate_argnums=0,
        ),
        evaluate=jax.jit(
            loss, in_shardings=(shardings["parameters"], rows, rows), out_shardings=whole
        ),
    )


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Mean over all tokens.

    The target's logit is found by comparing, since the gradient of an index is a scatter, which
    would copy all logits on a GPU; this one is fused with the softmax.
    """
    places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    found = jnp.where(places == targets[..., None], logits, 0).sum(axis=-1)
    return (jax.nn.logsumexp(logits, axis=-1) - found).mean()


def make_optimizer(recipe: Recipe) -> Any:
    """AdamW on gradients of norm 1 at most; the rate rises, then falls to a tenth as a cosine."""
    rate = optax.warmup_cosine_decay_schedule(
        recipe.learning_rate / (recipe.warmup + 1),  # not 0, with which the first step is lost
        recipe.learning_rate,
        recipe.warmup,
        max(recipe.steps, recipe.warmup + 1),
        recipe.learning_rate / 10,
    )

    def matrices(parameters: Tree) -> Tree:
        """Scales of norms do not decay; stacked ones have two axes as a matrix does."""
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "scale" not in str(path[-1]), parameters
        )

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=recipe.weight_decay, mask=matrices),
    )
