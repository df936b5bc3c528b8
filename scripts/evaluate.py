"""Held-out prompts, with and without the head: acceptance length, speed, lossless check, report.

python -m scripts.evaluate recipes/smollm2-135m-eagle3-quick.yaml
python -m scripts.evaluate recipes/smollm2-135m-eagle3-quick.yaml evaluate.per_category=1 evaluate.max_new_tokens=16
"""

from __future__ import annotations

from typing import Any

from data.prompts import load_prompts
from eval.drafters.eagle3 import Eagle3Drafter
from eval.harness import choose, evaluate
from eval.report import check_report_directory, headline, write_report
from eval.statistics import summarise
from heads.errors import UserError
from scripts.cli import recipe_arguments, run
from scripts.pipeline import device, open_target, open_template, split_prompts
from train.provenance import machine_class, versions, write_provenance
from train.recipe import Recipe, load_recipe
from train.state import find_checkpoint, load_head
from train.strict import dump_recipe


def main(argv: list[str]) -> None:
    """Run the command."""
    path, overrides, _ = recipe_arguments(argv, "Decode held-out prompts with and without the draft head and report what it is worth.")
    recipe = load_recipe(path, overrides)
    config = recipe.evaluate
    prompts = choose(load_prompts(config.prompts), config.per_category)
    training, validation = split_prompts(recipe)
    shared = {c.id for c in prompts} & {c.id for c in [*training, *validation]}
    if shared:
        print(f"warning: {len(shared)} of the {len(prompts)} evaluation prompts are training prompts; acceptance on them flatters the head")
    checkpoint = find_checkpoint(recipe.run_dir / "checkpoints", config.checkpoint)
    report = recipe.run_dir / "report"
    check_report_directory(report)
    on = device()
    head = load_head(checkpoint).to(on).eval()
    template = open_template(recipe)
    target = open_target(recipe, on, head.arch.taps)
    if head.arch.vocab_size != target.vocab_size or head.arch.hidden_size != target.hidden_size:
        raise UserError(
            f"the head in {checkpoint} was trained for another target: its vocabulary or width differs from {recipe.target.name}'s"
        )
    drafter = Eagle3Drafter(head, target, config.sampling, sample_proposals=config.proposals == "sampled")
    records = evaluate(target, template, drafter, prompts, config)
    summary = summarise(records, greedy=config.sampling.greedy, bootstrap=config.bootstrap, seed=config.seed)
    identity = {
        "target": {
            "name": recipe.target.name,
            "fingerprint": target.fingerprint,
            "dtype": str(target.dtype),
            "layers": target.num_layers,
        },
        "head": {
            "kind": head.arch.kind,
            "checkpoint": f"{recipe.name}/{checkpoint.name}",
            "taps": list(head.arch.taps),
            "draft_vocab_size": head.vocab.size,
            "draft_vocab": head.vocab.fingerprint,
            "parameters": sum(p.numel() for p in head.parameters()),
        },
        "template": {"fingerprint": template.fingerprint, "end_of_turn_ids": sorted(template.stop_ids)},
        "sampling": _sampling(recipe),
        "prompts": {"source": config.prompts.source, "prompts": len(prompts), "also in training": len(shared)},
        "machine": machine_class(),
        "versions": versions(),
    }
    write_report(report, summary, records, identity)
    write_provenance(report, dump_recipe(recipe))
    print(f"{headline(summary)}\nreport: {report / 'report.md'}")


def _sampling(recipe: Recipe) -> dict[str, Any]:
    config = recipe.evaluate
    greedy = config.sampling.greedy
    return {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "draft": "chain",
        "draft_length": config.draft_length,
        "proposals": "argmax" if greedy or config.proposals == "greedy" else "sampled from the head",
        "max_new_tokens": config.max_new_tokens,
        "batch": 1,
        "seed": config.seed,
    }


if __name__ == "__main__":
    run(main)
