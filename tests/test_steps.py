"""One `step` after another: what it may compute, whom it returns, and the text that each gained."""

import gc

import pytest
import torch
from conftest import ROOT

from engine import LLM
from sampler import SamplingParams

BUDGET = 24


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_a_step_keeps_to_its_budget_and_returns_what_it_changed(ahead):
    torch.set_num_threads(1)
    llm = LLM(ROOT / "models" / "embedded", device="cpu", async_scheduling=ahead, num_gpu_blocks_override=64,
              max_num_batched_tokens=BUDGET, progress=False)
    schedule, spent = llm.scheduler.schedule, []
    llm.scheduler.schedule = lambda: (seqs := schedule()) and spent.append(
        sum(seq.num_scheduled_tokens for seq in seqs)) or seqs
    prompts = ["Once", [5] * 20, "The cat sat on a", [7] * 61, "A dog", "Lily and Tom went to the"]
    requests = [llm.requests[llm.add_request(prompt, SamplingParams(
        max_tokens=6 + 3 * i, seed=i, n=1 + (i == 2), ignore_eos=True))] for i, prompt in enumerate(prompts)]
    scored = llm.add_request([9] * 40, SamplingParams(prompt_logprobs=0), score_only=1)
    requests.append(llm.requests[scored])  # it ends without a token
    outs = [(request, out) for request in requests for out in request.outputs]
    before = [("", 0, None)] * len(outs)
    for step in range(100):
        if step == 9:
            llm.abort(requests[4].request_id)
            before = [(out.text, len(out.token_ids), out.finish_reason) for _, out in outs]
        returned = llm.step()
        after = [(out.text, len(out.token_ids), out.finish_reason) for _, out in outs]
        changed = {request.request_id for (request, _), old, new in zip(outs, before, after) if old != new}
        assert sorted(request.request_id for request in returned) == sorted(changed)
        for (_, out), (text, *_), (longer, *_) in zip(outs, before, after):
            assert text + out.delta == longer, "a delta is the step's own"
        before = after
        if not llm.has_unfinished_requests and not returned:
            break
    assert all(request.finished for request in requests) and requests[4].outputs[0].finish_reason == "abort"
    assert max(spent) == BUDGET and all(0 < n <= BUDGET for n in spent)


@pytest.mark.gpu
def test_steps_on_a_gpu_leave_no_cycles():
    """Eager prefills, replayed graphs, sampling and logprobs; `generate` does not look for cycles meanwhile."""
    llm = LLM(ROOT / "models" / "embedded", num_gpu_blocks_override=64, enable_prefix_caching=False, progress=False)
    params = SamplingParams(max_tokens=20, seed=1, top_p=0.9, logprobs=2, ignore_eos=True)
    llm.generate(["Once", "The cat"], params)  # compiles and captures
    gc.collect()
    gc.disable()
    try:
        llm.generate(["Once", "The cat"], params)
        found = gc.collect()
    finally:
        gc.enable()
    assert found == 0
