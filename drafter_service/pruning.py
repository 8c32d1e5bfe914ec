"""Confidence pruning, shared by all drafters: keep the likely part of a tree, closed under ancestors."""

from specla.drafter_service.tree import EMPTY, ROOT, DraftTree


def prune(tree: DraftTree, *, tau: float, max_nodes: int) -> DraftTree:
    """The candidates whose path is within `tau` nats of the best one's, best first, at most `max_nodes` of them.

    Path log-probabilities never rise from parent to child, and a tie goes to the lower index, so whatever
    is kept has its ancestors kept. The candidates stay in the order they had. Source: the paper's section 6.

    Args:
        tree: any valid tree.
        tau: nats, >= 0.
        max_nodes: >= 0; 0 gives the empty tree.
    """
    if max_nodes <= 0 or not len(tree):
        return EMPTY
    paths = tree.path_log_probs()
    least = max(paths) - tau
    if len(tree) <= max_nodes and min(paths) >= least:
        return tree
    kept = [node for node, path in enumerate(paths) if path >= least]
    kept.sort(key=lambda node: (-paths[node], node))
    kept = sorted(kept[:max_nodes])
    new_index = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
    return DraftTree(
        tuple(tree.tokens[node] for node in kept),
        tuple(new_index[tree.parents[node]] for node in kept),
        tuple(tree.log_probs[node] for node in kept),
    )
