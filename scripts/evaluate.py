"""Held-out prompts, with and without the head: acceptance length, speed, lossless check, report.

python -m scripts.evaluate recipes/smollm2-135m-eagle3-quick.yaml
python -m scripts.evaluate recipes/smollm2-135m-eagle3-quick.yaml evaluate.per_category=1 evaluate.max_new_tokens=16
python -m scripts.evaluate recipes/smollm2-135m-eagle3-quick.yaml --drafter lookup
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data.prompts import load_prompts
from eval.drafters.simple import NoneDrafter
from eval.harness import choose, evaluate
from eval.quality import measure_quality
from eval.report import check_report_directory, headline, write_report
from eval.statistics import summarise
from scripts.cli import add_drafter_option, drafter_override, recipe_arguments, run
from scripts.pipeline import TRAINING, about_drafter, device, open_drafter, open_for_decoding, split_prompts
from train.provenance import machine_class, versions, write_provenance
from train.recipe import Recipe, load_recipe
from train.strict import dump_recipe


def main(argv: list[str]) -> None:
    """Run the command."""
    path, overrides, options = recipe_arguments(
        argv, "Decode held-out prompts with and without a drafter and report what it is worth.", add_drafter_option
    )
    recipe = load_recipe(path, overrides + drafter_override(options.drafter))
    config = recipe.evaluate
    prompts = choose(load_prompts(config.prompts), config.per_category)
    training, validation = split_prompts(recipe)
    shared = {c.id for c in prompts} & {c.id for c in [*training, *validation]}
    by_head = config.drafter.kind == "head"
    if shared and by_head:
        print(f"warning: {len(shared)} of the {len(prompts)} evaluation prompts are training prompts; acceptance on them flatters the head")
    label = config.label or ("" if by_head else config.drafter.kind)
    report = recipe.run_dir / (f"report-{label}" if label else "report")
    check_report_directory(report)
    on = device()
    opened = open_for_decoding(recipe, on, by_head)
    template, target, head, checkpoint, adapter = opened.template, opened.target, opened.head, opened.checkpoint, opened.adapter
    drafter, about = open_drafter(recipe, target, template, on, head)
    fingerprint, quality = target.fingerprint, None
    if adapter is not None:
        by_original = evaluate(target, template, NoneDrafter(), prompts, config, baseline=False)
        quality = measure_quality(target, adapter, by_original, bootstrap=config.bootstrap, seed=config.seed)
        adapter.merge()
    records = evaluate(target, template, drafter, prompts, config)
    about = about_drafter(drafter, about)  # only now: one may have chosen its method by the first prompt
    greedy = config.sampling.greedy
    summary = summarise(records, greedy=greedy, typical=not config.lossless, bootstrap=config.bootstrap, seed=config.seed, quality=quality)
    identity = {
        "target": {
            "name": recipe.target.name,
            "fingerprint": fingerprint,
            "dtype": str(target.dtype),
            "layers": target.num_layers,
            **({} if adapter is None else {"changed by": f"an adapter of rank {adapter.rank}"}),
        },
        "drafter": {"name": drafter.name, "about": about},
        "head": describe_head(head, f"{recipe.name}/{checkpoint.name}") | training_effort(recipe.run_dir) if checkpoint else {},
        "template": {"fingerprint": template.fingerprint, "end_of_turn_ids": sorted(template.stop_ids)},
        "sampling": _sampling(recipe),
        "prompts": {"source": config.prompts.source, "prompts": len(prompts), "also in training": len(shared)},
        "machine": machine_class(),
        "versions": versions(),
    }
    write_report(report, summary, records, identity)
    write_provenance(report, dump_recipe(recipe))
    print(f"{about}\n{headline(summary)}\nreport: {report / 'report.md'}")


def describe_head(head: Any, checkpoint: str) -> dict[str, Any]:
    """What a report says of the head."""
    return {
        "kind": head.arch.kind,
        "checkpoint": checkpoint,
        "taps": list(head.arch.taps or ()),
        "draft_vocab_size": head.vocab.size,
        "draft_vocab": head.vocab.fingerprint,
        "parameters": sum(p.numel() for p in head.parameters()),
    }


def training_effort(run_dir: Path) -> dict[str, Any]:
    """What training took, as far as it is known: CPU seconds, those of steps before a restart reckoned like the others."""
    try:
        effort = json.loads((run_dir / TRAINING).read_text())
        share = effort["steps"] / (effort["steps"] - effort["from_step"])
        seconds = round(share * effort["cpu_seconds"])
        return {name: effort[name] for name in ("steps", "slots_with_loss", "trained_parameters")} | {"training_cpu_seconds": seconds}
    except (OSError, ValueError, KeyError):
        return {}


def _sampling(recipe: Recipe) -> dict[str, Any]:
    config = recipe.evaluate
    greedy, shape = config.sampling.greedy, config.drafter.shape
    return {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "repetition_penalty": config.repetition_penalty,
        "stop": list(config.stop),
        "draft": shape.kind if shape.kind == "chain" else f"{shape.kind} tree of at most {shape.nodes} tokens",
        "draft_length": config.draft_length,
        "proposals": "most likely" if greedy or config.proposals == "greedy" or shape.kind == "dynamic" else "sampled",
        "acceptance": "exact" if config.lossless else "typical, NOT lossless",
        "max_new_tokens": config.max_new_tokens,
        "batch": config.batch_size,
        "seed": config.seed,
    }


if __name__ == "__main__":
    run(main)
