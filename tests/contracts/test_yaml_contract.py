"""Every YAML file in pipelines/ and site_configs/ loads and fits the code, whatever it is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from tesla_med.config.files import (
    load_pipeline,
    load_site,
    pipeline_files,
    read_yaml,
    site_files,
    site_folders,
)
from tesla_med.config.models import PROTOCOLS, SiteConfig
from tesla_med.config.tables import table_files
from tesla_med.tasks.base import TASKS

ROOT = Path(__file__).resolve().parent.parent.parent
ROOTS = [ROOT]
PIPELINES = pipeline_files(ROOTS)
SITES = {
    f"{folder}/{site}": path
    for folder in site_folders(ROOTS)
    for site, path in site_files(folder, ROOTS).items()
}
EVERY_PIPELINE = pytest.mark.parametrize("name", PIPELINES)
OF_ANY = {name for name in SITES if not load_site(name, roots=ROOTS).institution}
"""Sites that stand for any images, so that nothing is known of them."""
EVERY_SITE = pytest.mark.parametrize("name", [name for name in SITES if name not in OF_ANY])


def test_there_are_files():
    assert {"prostate", "spinal_cord"} <= set(PIPELINES)
    assert {"prostate/A", "prostate/F", "spinal_cord/1"} <= set(SITES)


def test_no_file_is_left_out():
    found = {path for folder in ("pipelines", "site_configs") for path in (ROOT / folder).rglob("*.y*ml")}
    tables = set(table_files(ROOTS).values())
    assert found == tables | set(PIPELINES.values()) | set(SITES.values())


@EVERY_PIPELINE
def test_pipelines_load(name):
    pipeline = load_pipeline(name, roots=ROOTS)
    assert pipeline.name == name
    assert pipeline.title
    assert pipeline.citation
    assert (pipeline.classes[0].name == "background") == (pipeline.task == "segmentation")
    assert len({item.color for item in pipeline.classes}) == len(pipeline.classes)
    assert pipeline.sites in site_folders(ROOTS)


@EVERY_PIPELINE
def test_pipelines_by_path(name):
    pipeline = load_pipeline(str(PIPELINES[name]), roots=ROOTS)
    assert pipeline == load_pipeline(name, roots=ROOTS)


@EVERY_PIPELINE
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_method_parameters_fit_the_methods(name, protocol):
    from tesla_med.tta import METHODS, MethodParams
    from tesla_med.tta.base import check_params

    pipeline = load_pipeline(name, roots=ROOTS)
    methods = set(pipeline.methods) | set(pipeline.protocols.get(protocol, {})) | {pipeline.method}
    assert methods <= set(METHODS.names())
    for method in METHODS.names():
        assert isinstance(check_params(method, pipeline.method_params(method, protocol)), MethodParams)


@EVERY_PIPELINE
def test_the_default_method_has_the_default_protocol(name):
    from tesla_med.tta import METHODS

    pipeline = load_pipeline(name, roots=ROOTS)
    assert pipeline.protocol in METHODS.get(pipeline.method).protocols


@EVERY_PIPELINE
def test_the_network_exists(name):
    from tesla_med.models import MODELS
    from tesla_med.models.base import parameter_count

    pipeline = load_pipeline(name, roots=ROOTS)
    network = MODELS.get(pipeline.model.name)
    assert set(network.Params.model_validate(pipeline.model.params).model_fields_set) == set(
        pipeline.model.params
    )
    example = network.Params.model_validate(network.example)  # small, and of the same kind
    assert parameter_count(network.build(example, pipeline.channels, len(pipeline.classes))) > 0


@EVERY_PIPELINE
def test_the_reports_exist(name):
    from tesla_med.reports.base import REPORTS

    pipeline = load_pipeline(name, roots=ROOTS)
    task = TASKS.get(pipeline.task)
    for report in pipeline.reports or task.reports:
        assert REPORTS.get(report).reads(task.result)


@EVERY_PIPELINE
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_recipes_restart_as_they_say(name, protocol):
    pipeline = load_pipeline(name, roots=ROOTS)
    tiles = pipeline.whole_images
    site = SiteConfig(id="X", pipeline=pipeline.sites, institution="Nowhere")
    reset = TASKS.get(pipeline.task)(site, pipeline).reset_for(protocol)
    fixed = name.endswith(("_paper", "_released")) or tiles
    assert reset == ("site" if fixed or protocol.endswith("M") else "case")


@EVERY_SITE
def test_sites_load(name):
    site = load_site(name, roots=ROOTS)
    assert f"{site.pipeline}/{site.id}" == name
    assert site.institution
    assert site.description
    assert site.terms
    assert site.citation
    assert site.scanner.sequence
    assert all(site.files.image)


@pytest.mark.parametrize("name", sorted(OF_ANY))
def test_a_site_of_any_images_takes_them_all_and_says_nothing_else(name):
    site = load_site(name, roots=ROOTS)
    assert site.description
    assert site == SiteConfig(
        id=site.id, pipeline=site.pipeline, institution="", description=site.description, files={"image": "*"}
    )


@EVERY_SITE
def test_masks_of_a_site_fit_the_classes_of_its_pipelines(name):
    site = load_site(name, roots=ROOTS)
    written = {layer.write for layer in site.files.masks if layer.write is not None}
    written |= {label for layer in site.files.masks for label in (layer.values or {}).values()}
    written |= set(site.tiles.values())
    assert written
    serving = [load_pipeline(item, roots=ROOTS) for item in PIPELINES]
    serving = [pipeline for pipeline in serving if pipeline.sites == site.pipeline]
    assert serving
    for pipeline in serving:
        assert written - {0} == {item.value for item in pipeline.foreground} - {0}


@EVERY_SITE
def test_no_image_pattern_is_a_mask_pattern(name):
    files = load_site(name, roots=ROOTS).files
    masks = [layer.pattern for layer in files.masks]
    assert not set(files.image) & set(masks)
    assert len(set(masks)) == len(masks)


@pytest.mark.parametrize("path", [*PIPELINES.values(), *SITES.values()], ids=lambda path: path.stem)
def test_files_are_plain(path):
    content = read_yaml(path)
    assert "id" not in content
    assert "name" not in content
    assert "\t" not in path.read_text(encoding="utf-8")


def test_institutions_of_a_folder_are_told_apart():
    for folder in site_folders(ROOTS):
        ids = [site.lower() for site in site_files(folder, ROOTS)]
        assert len(set(ids)) == len(ids)
