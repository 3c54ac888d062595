"""What tests look at inside an engine that runs in this process, and how they drive it."""

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

EVERYTHING = {
    "budget_tokens": 1024,
    "handover_tokens": 256,
    "handover": "always",
    "correction_margin": 0,
    "swap_margin": 0,
}
"""Settings with which a request of up to 1,024 tokens attends to everything once handed over: it gets the stock tokens."""


def greedy(engine, prompts, tokens=24, **sampling):
    """The token ids that follow each prompt."""
    wanted = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **sampling)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def likeliest(engine, prompts, tokens=1):
    """Log probabilities of the five likeliest tokens at each place behind each prompt, request by request."""
    wanted = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=5, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    return [[{token: one.logprob for token, one in place.items()} for place in o.outputs[0].logprobs] for o in outputs]


def scheduler(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler


def ledger(engine):
    return scheduler(engine).connector._books


def worker():
    return get_kv_transfer_group().worker


class Driver:
    """Steps an engine by hand, and keeps what every request has got so far."""

    def __init__(self, engine):
        self.engine = engine.llm_engine
        self.pool = scheduler(engine).kv_cache_manager.block_pool
        self.scheduler = scheduler(engine)
        self.tokens = {}
        self.most_running = 0

    def add(self, name, prompt, tokens=24):
        wanted = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        self.tokens[name] = []
        self.engine.add_request(name, {"prompt_token_ids": prompt}, wanted)

    def abort(self, name):
        self.engine.abort_request([name])

    def preempt(self):
        """Preempt the request that came last, as a scheduler short of blocks does, and let the device forget all prefixes."""
        self.scheduler._preempt_request(self.scheduler.running.pop(), 0.0)
        self.pool.evict_blocks(set(range(1, self.pool.num_gpu_blocks)))

    def step(self):
        """One step; returns whether there is more to do."""
        for output in self.engine.step():
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)
        self.most_running = max(self.most_running, len(self.scheduler.running))
        return self.engine.has_unfinished_requests()

    def finish(self):
        while self.step():
            pass
        return self.tokens


def assert_all_given_back(engine):
    """Device blocks are free, and after one more step for the workers to hear of it, so is the host but for what it keeps."""
    free = scheduler(engine).kv_cache_manager.block_pool
    assert free.get_num_free_blocks() == free.num_gpu_blocks - 1
    engine.reset_prefix_cache(reset_connector=True)
    greedy(engine, [[1, 2, 3]], 1)
    manager = worker().manager
    manager.check_integrity()
    assert ledger(engine).host_used == 0
    assert manager.sequences == []
    assert manager.stats().arena_bytes == 0
