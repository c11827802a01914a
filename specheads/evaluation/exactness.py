"""Exactness: whether drafters leave the target's greedy text and its sampling law as they are, on a model of one's own.

Greedy text is compared with that of plain `generate`. For sampling, the joint law of the first tokens after a prompt is worked
out from the target's own scores, and many sampled texts are held against it by a G-test. A control whose drafts lie about the law
they come from has to fail that test, else it could not have seen a fault. The result is a JSON document:

    {"kind": "exactness",
     "settings": {option: value},            # and "prompts_sha256"
     "provenance": {...},                    # of `provenance.provenance`
     "passed": true,
     "words": ["...", ...],                  # the verdict as sentences
     "rounding": {                           # one-token passes against longer ones, on the target's own greedy text
       "positions": 384, "explained_gap": 1e-4,       # the largest top-2 gap that rounding explains
       "law_divergence": 1e-9},                       # chi-square distance of the laws per token, mean
     "power": {
       "samples": 2000, "tests": 10, "level": 0.001,  # the level of all tests together (Bonferroni: level / tests for each)
       "probability": 0.95, "total_variation": 0.08}, # the worst over prompts
     "prompts": [{"name": "1", "tokens": 4, "cells": 120, "total_variation": 0.08}],
     "results": [
       {"variant": "suffix", "verdict": "exact",      # "exact", "not exact", "blind" (the control was not seen)
        "words": "...",
        "greedy": {"rows": 4, "identical": 4,
                   "divergences": [{"prompt": "1", "row": 0, "position": 7, "plain": 5, "other": 9, "gap": 1e-6,
                                    "is_explained": true}]},
        "sampling": [{"prompt": "1", "statistic": 80.1, "cells": 120, "p_value": 0.4, "is_rejected": false,
                      "num_draft_tokens": 4000, "num_accepted_draft_tokens": 900}],
        "control": [...]}]}                  # likewise, up to the first prompt where it is seen; empty if nothing is drafted

The exit status is 0 if all variants are exact, 1 if one is not or the test was blind for one, 2 for input that cannot be used.
"""
