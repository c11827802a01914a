"""Acceptance: how much of its drafts the target accepts, for each drafter, temperature, draft length and tree budget.

Drafts are as long as they may be (`adaptive=False`), so that K is K. The result is a JSON document:

    {"kind": "acceptance",
     "settings": {option: value},            # and "prompts_sha256"
     "provenance": {...},                    # of `provenance.provenance`: command, versions, device, dtype
     "results": [                            # one per combination, in the order of the options
       {"variant": "suffix", "temperature": 0.0, "draft_tokens": 4, "tree_nodes": null,
        "figures": FIGURES, "categories": {category: FIGURES}}],
     "trials": [                             # one per combination and batch of prompts
       {"trial": 0, "result": 0, "category": "qa", "prompts": [name], "rows": [COUNTS]}]}

FIGURES are pooled over prompts, under the names of `SpeculationStats`:

    {"prompts": 8, "num_spec_steps": ..., "num_draft_tokens": ..., "num_accepted_draft_tokens": ..., "num_emitted_tokens": ...,
     "mean_acceptance_length": {"value": 2.1, "low": 1.9, "high": 2.3},      # bootstrap over prompts; null for a single one
     "draft_acceptance_rate": 0.4,                                           # null if nothing was drafted
     "acceptance_at_position": [...], "conditional_acceptance_at_position": [...], "drafted_to_position": [...],
     "acceptance_histogram": [...]}          # rounds that accepted 0, 1, ... tokens; the pass over the prompt accepts 0

COUNTS are the fields of `RowStats` for one prompt, all its turns together.
"""
