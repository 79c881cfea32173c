"""Prefill/decode deciders, one module each, and what a hand-off is. Importing the package registers them all."""

from deciders import (
    always_disagg_multimodal_decider,
    always_disagg_pd_decider,
    cost_pd_decider,
    isl_bounding_pd_decider,
    lookup_table_pd_decider,
    prefix_based_pd_decider,
)

__all__ = [
    "always_disagg_multimodal_decider",
    "always_disagg_pd_decider",
    "cost_pd_decider",
    "isl_bounding_pd_decider",
    "lookup_table_pd_decider",
    "prefix_based_pd_decider",
]
