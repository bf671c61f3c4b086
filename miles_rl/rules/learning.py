"""What cannot be learned under a config, and knobs of the learner that cannot act."""

from __future__ import annotations

from collections.abc import Iterator

from miles_rl.rules.finding import Config, Finding, finding, option, options


def groups(config: Config) -> Iterator[Finding]:
    if config["rollout"]["group_size"] < 2 and config["loss"].get("advantage") != "reinforce_pp":
        yield finding(
            "error",
            "rollout.group_size",
            config["rollout"]["group_size"],
            "a group of one has no baseline: every advantage is 0 and nothing is learned",
            "give 2 or more, or loss=reinforce_pp",
        )


def lengths(config: Config) -> Iterator[Finding]:
    rollout = config["rollout"]["agent"]
    if rollout["turn_tokens"] >= rollout["session_tokens"]:
        yield finding(
            "error",
            "rollout.agent.turn_tokens",
            rollout["turn_tokens"],
            f"one turn fills the session of {rollout['session_tokens']} tokens and leaves no room for a prompt",
            "give less than rollout.agent.session_tokens",
        )
    model_context = config["model"].get("architecture", {}).get("context_length")
    context = config["engine"].get("max_context") or model_context
    if context is not None and rollout["session_tokens"] > context:
        yield finding(
            "error",
            "rollout.agent.session_tokens",
            rollout["session_tokens"],
            f"the engine serves at most {context} tokens of context",
            f"give at most {context}",
        )
    budget = config["trainer"].get("max_tokens_per_micro_batch")
    if budget is not None and rollout["session_tokens"] > budget:
        yield finding(
            "error",
            "trainer.max_tokens_per_micro_batch",
            budget,
            f"one session may have {rollout['session_tokens']} tokens and would not fit",
            f"give {rollout['session_tokens']} or more",
        )


def support(config: Config) -> Iterator[Finding]:
    rollout, loss = config["rollout"]["agent"], config["loss"]
    uses_ratio = loss.get("correction", "none") != "none" or loss.get("old_logprobs") == "rollout"
    if (rollout["top_p"] < 1 or rollout["top_k"] > 0) and uses_ratio:
        yield finding(
            "error",
            "rollout.agent.top_p" if rollout["top_p"] < 1 else "rollout.agent.top_k",
            rollout["top_p"] if rollout["top_p"] < 1 else rollout["top_k"],
            "log-probabilities are over the whole vocabulary and the samples are not, so every importance ratio is off"
            " by the mass that was kept",
            "give top_p=1 and top_k=-1, or loss.correction=none with loss.old_logprobs=recomputed",
        )


def clip(config: Config) -> Iterator[Finding]:
    loss = config["loss"]
    single = config["trainer"].get("optimizer_steps_per_batch") == 1
    if single and loss.get("old_logprobs") == "recomputed" and loss.get("policy") in ("ppo_clip", "gspo", "cispo"):
        yield finding(
            "inert",
            "loss.clip_low, loss.clip_high",
            (loss.get("clip_low"), loss.get("clip_high")),
            "with one optimizer step per batch and recomputed old log-probabilities the ratio is 1",
            "only loss.correction acts; raise trainer.optimizer_steps_per_batch to make the clip act",
        )


def correction_low(config: Config) -> Iterator[Finding]:
    loss = config["loss"]
    if loss.get("correction") in ("tis_token", "tis_sequence") and loss.get("correction_low", 0) > 0:
        yield finding(
            "note",
            "loss.correction_low",
            loss["correction_low"],
            "it lifts the weight of tokens that the policy has left, which keeps pushing on them",
            "0 is the safe value",
        )


def periods(config: Config) -> Iterator[Finding]:
    run = config["stages"].get("trainer", {}).get("run", {})
    for name in ("eval_every", "checkpoint_every"):
        if run.get(name) and run[name] > config["steps"]:
            yield finding(
                "inert",
                f"stages.trainer.run.{name}",
                run[name],
                f"the run ends after steps={config['steps']}",
                "give at most that",
            )


def fault(config: Config) -> Iterator[Finding]:
    """A fault that waits for weights which the run never makes would look as if it had been survived."""
    if (values := options(config, "faults.at_version", "steps")) is not None and values[0] > values[1]:
        message = f"the run ends with the weights of version {values[1]}, so the fault never strikes"
        yield finding("error", "faults.at_version", values[0], message, f"give at most {values[1]}, or more steps")


def weights(config: Config) -> Iterator[Finding]:
    """Knobs of publishing and of the reference policy."""
    path = "stages.fleet.run.flush_cache"
    if option(config, path) and str(option(config, "engine._target_")).endswith(".EmbeddedEngine"):
        message = "the embedded engine never serves keys and values of other weights, and drops them by itself"
        yield finding("inert", path, True, message, "give false")
    reference, coefficient = option(config, "trainer.reference_model_dir"), option(config, "loss.kl_coef")
    if reference is not None and coefficient == 0:
        message = "loss.kl_coef is 0, so no reference policy is asked"
        yield finding("inert", "trainer.reference_model_dir", reference, message, "give null, or a coefficient")


def schedule(config: Config) -> Iterator[Finding]:
    """Does the learning rate's schedule last as long as the run, and its peak come before the end?"""
    steps, last = option(config, "steps"), option(config, "trainer.schedule_steps")
    falls = option(config, "trainer.lr_schedule") not in (None, "constant")
    if falls and last is not None and last < steps:
        message = f"the learning rate is 0 after {last} of the steps={steps}, where the run would end with an error"
        yield finding("error", "trainer.schedule_steps", last, message, f"give {steps} or more")
    names = ("steps", "trainer.warmup_steps", "trainer.optimizer_steps_per_batch")
    if (values := options(config, *names)) is not None and values[1] > values[0] * values[2]:
        total = values[0] * values[2]
        message = f"the run has {total} optimizer steps, so the peak learning rate is never reached"
        yield finding("note", "trainer.warmup_steps", values[1], message, f"give at most {total}")


RULES = (groups, lengths, support, clip, correction_low, periods, fault, weights, schedule)
