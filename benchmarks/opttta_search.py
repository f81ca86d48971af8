"""OptTTA with its authors' whole budget of steps and views, one sub-policy after the other.

Example::

    python benchmarks/opttta_search.py --device cuda --precision bfloat16 --out opttta
    python benchmarks/opttta_search.py --table --out opttta

On the first volume of a site each of 21 sub-policies is learned for 1,000 steps of 12 slices; the best three
stay, are learned for 100 steps on every further volume, and predict with 128 views each. The sub-policies do
not depend on each other: each has random numbers of its own and is kept below ``--out`` once it is learned,
so that the search goes on where it was, and ``--part 1/4`` takes every fourth, for several processes. Images
have the scaling that was chosen without labels; there is no guard.

Dice is in percent on the model's grid, the mean over classes, with the pipeline's largest component. Labels
are read after the masks, and choose nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from reference import SHARED, WEIGHTS, Reader, at_model_mask, mean_dice

from tesla_med.config.files import load_pipeline, load_site
from tesla_med.engine.scaling import Chooser
from tesla_med.models.base import default_device, device_name
from tesla_med.models.checkpoint import versions
from tesla_med.models.loading import load_model
from tesla_med.tta._shared.opttta_views import bright_slices
from tesla_med.tta.base import MethodContext, make_method
from tesla_med.types import Ref, Unit


class Search:
    """The search on the first volume of a site, and what follows it.

    Args:
        site: id.
        options: of the command line.
    """

    def __init__(self, site: str, options: argparse.Namespace) -> None:
        self.site, self.options = site, options
        loaded = load_model(options.weights, load_pipeline(options.task, tuple(options.set)))
        self.pipeline = loaded.pipeline
        self.device = default_device(options.device)
        told = self.device, options.seed, self.pipeline.preprocessing.model_range, options.precision
        context = MethodContext(*told, self.pipeline.predict_batch)
        self.source = make_method("source", loaded.model, {}, context)
        params = self.pipeline.method_params("opttta", "N-O")
        self.method: Any = make_method("opttta", loaded.model, params, context)
        known = load_site(site if site.endswith((".yaml", ".yml")) else f"{options.task}/{site}")
        self.reader = Reader(known, self.pipeline, options.data / options.task, options.limit)
        self.chooser = Chooser(self.pipeline.scaling, self.source)
        self.folder = options.out / f"{Path(site).stem}-{options.seed}"

    def unit(self, ref: Ref) -> Unit:
        """Return a volume in the chosen scaling."""
        return self.chooser(self.reader(ref))

    def path(self, index: int) -> Path:
        """Return where a sub-policy is kept once it is learned."""
        return self.folder / f"{index:02d}.pt"

    def learn(self, end: float) -> None:
        """Learn the sub-policies of this part that are not there yet, and start none after ``end``."""
        method, steps = self.method, self.method.params.first_steps
        number, parts = (int(item) for item in self.options.part.split("/"))
        mine = [index for index in range(len(method.policies)) if index % parts == number - 1]
        todo = [index for index in mine if not self.path(index).is_file()]
        images = self.unit(self.reader.refs[0]).images
        bright = bright_slices(images)
        self.folder.mkdir(parents=True, exist_ok=True)
        print(f"{self.site}: {len(todo)} sub-policies to learn", flush=True)
        for index in todo:
            if time.monotonic() > end:
                print("the time is up; call again to go on", flush=True)
                return
            method.generator.manual_seed(1000 * self.options.seed + index)
            start = time.perf_counter()
            found = method.learn(index, images, bright, steps)
            state = {
                "policy": method.policies[index].state_dict(),
                "optimizer": method.optimizers()[f"policy_{index}"].state_dict(),
                "found": found,
                "seconds": time.perf_counter() - start,
            }
            part = self.path(index).with_suffix(".part")
            torch.save(state, part)
            part.replace(self.path(index))
            members = " ".join(method.policies[index].members)
            print(f"{index} {members}: {found[0]:.2f}, {state['seconds']:.0f} s", flush=True)

    def result(self) -> dict[str, Any] | None:
        """Return the figures of every volume; None while sub-policies are missing."""
        method = self.method
        files = [self.path(index) for index in range(len(method.policies))]
        if not all(map(Path.is_file, files)):
            return None
        states = [torch.load(path, map_location=self.device, weights_only=True) for path in files]
        for index, state in enumerate(states):
            method.policies[index].load_state_dict(state["policy"])
            method.optimizers()[f"policy_{index}"].load_state_dict(state["optimizer"])
        found = torch.stack([state["found"] for state in states])
        method.choose(found)
        method.generator.manual_seed(1000 * self.options.seed + len(states))
        return {
            "site": self.site,
            "seed": self.options.seed,
            "params": method.params.model_dump(mode="json"),
            "kept": [method.policies[index].members for index in method.kept],
            "learned": [method.policies[index].summary() for index in method.kept],
            "totals": found[:, 0].tolist(),
            "search_seconds": sum(state["seconds"] for state in states),
            "volumes": [*self.volumes()],
            "device": device_name(self.device),
            "versions": versions(),
        }

    def volumes(self) -> Iterator[dict[str, Any]]:
        """Yield the figures of every volume, in order; all but the first are learned from before."""
        for number, ref in enumerate(self.reader.refs):
            unit, start = self.unit(ref), time.perf_counter()
            if number:
                self.method.adapt(unit.images)
            probs = self.method.predict(unit.images)
            about = {"case": ref.name, "slices": len(unit.images), "seconds": time.perf_counter() - start}
            yield about | {
                "dice": self.dice(ref.name, probs),
                "source": self.dice(ref.name, self.source.predict(unit.images)),
            }

    def dice(self, case: str, probs: torch.Tensor) -> float | None:
        """Return the mean Dice over the classes in percent."""
        truth, mask = self.reader.at_model[case], at_model_mask(probs.cpu(), self.pipeline)
        return mean_dice(truth, mask, probs.shape[1])


def table(out: Path) -> str:
    """Return what is finished as Markdown."""
    heads = ("site", "seed", "case", "source", "opttta", "kept sub-policies", "search, s", "prediction, s")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for path in sorted(out.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        kept = "; ".join(" ".join(members) for members in found["kept"])
        for item in found["volumes"]:
            values = ["n/a" if item[key] is None else f"{item[key]:.1f}" for key in ("source", "dice")]
            cells = [found["site"], str(found["seed"]), item["case"], *values, kept]
            cells += [f"{found['search_seconds']:.0f}", f"{item['seconds']:.0f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="spinal_cord", choices=tuple(WEIGHTS))
    parser.add_argument("--sites", nargs="+", default=["gm2018-JUN", "gm2018-CHUM"], help="ids or files")
    parser.add_argument("--data", type=Path, default=SHARED / "data", help="folder with one folder a task")
    parser.add_argument("--weights", type=Path, help="of the source model (default: the reference's)")
    parser.add_argument("--out", type=Path, required=True, help="folder of what is learned and of figures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", default="1/1", help="of the sub-policies: 2/4 is the second of four")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing after so many")
    parser.add_argument("--limit", type=int, help="volumes a site")
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE over the pipeline")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--table", action="store_true", help="only print what is finished")
    options = parser.parse_args(words)
    options.weights = options.weights or SHARED / "reference" / WEIGHTS[options.task]
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Search, predict, print."""
    options = parse(words)
    if not options.table:
        end = time.monotonic() + 60 * options.minutes
        options.out.mkdir(parents=True, exist_ok=True)
        for site in options.sites:
            search = Search(site, options)
            search.learn(end)
            found = search.result()
            if found is not None:
                command = " ".join(["python", "benchmarks/opttta_search.py", *sys.argv[1:]])
                text = json.dumps({"command": command, **found}, indent=1)
                search.folder.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(table(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
