from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tesla_med.config.models import Files, SiteConfig
from tesla_med.errors import ConfigError, DataError
from tesla_med.io.cases import CaseList, find_cases
from tesla_med.io.patterns import NamePattern


def site(identity: str = "D", institution: str = "UCL", **keys: Any) -> SiteConfig:
    files = {"image": "Case*.nii.gz", "masks": [{"pattern": "*_segmentation.nii.gz", "write": 1}]}
    return SiteConfig.model_validate(
        {"id": identity, "pipeline": "prostate", "institution": institution, "files": files, **keys}
    )


def fill(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def found(cases: CaseList) -> list[str]:
    return [case.name for case in cases.cases]


def reasons(cases: CaseList) -> dict[str, str]:
    return {path.relative_to(cases.folder).as_posix(): reason for path, reason in cases.skipped}


@pytest.mark.parametrize(
    ("pattern", "name", "key"),
    [
        ("Case*.nii.gz", "Case07.nii.gz", "case07"),
        ("*_segmentation.nii.gz", "Case07_segmentation.nii.gz", "case07"),
        ("*_segmentation.nii.gz", "CASE07_SEGMENTATION.NII", "case07"),
        ("site1-sc*-mask-r1.nii.gz", "site1-sc03-mask-r1.mha", "site1-sc03"),
        ("site1-sc*-mask-r1.nii.gz", "site10-sc03-mask-r1.nii.gz", None),
        ("*_T2starw.nii.gz", "sub-1_T2starw_seg-manual.nii.gz", None),
        ("image.nii.gz", "image.nrrd", ""),
        ("image.nii.gz", "image2.nrrd", None),
        ("a?[0-9]*", "ab1x.nii", "ab1x"),
        ("a[!b]*", "ab.nii", None),
        ("a[!b]*", "ac.nii", "ac"),
        ("a(b)+.c*", "a(b)+.c1.nii.gz", "a(b)+.c1"),
        ("Ü*", "U\u0308 1.nii.gz", "ü 1"),
    ],
)
def test_patterns(pattern: str, name: str, key: str | None) -> None:
    found = NamePattern(pattern).match(Path(name))
    assert (None if found is None else found.key) == key


def test_bad_pattern_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\[z-a\]"):
        NamePattern("[z-a]*")


def test_image_and_mask_meet_in_one_folder(tmp_path: Path) -> None:
    fill(
        tmp_path,
        "p1/Case1.nii.gz",
        "p1/Case1_segmentation.nii.gz",
        "p2/Case1.nii.gz",
        "p2/x_segmentation.nii",
    )
    cases = find_cases(tmp_path, site())
    assert found(cases) == ["p1/Case1", "p2/Case1"]
    assert cases.cases[0].masks == (tmp_path / "p1/Case1_segmentation.nii.gz",)
    assert cases.cases[0].labelled
    assert cases.cases[1].masks == (None,)
    assert reasons(cases) == {"p2/x_segmentation.nii": "a mask without its image"}


def test_extension_and_names_ignore_case_and_dot_files_are_counted(tmp_path: Path) -> None:
    fill(tmp_path, "._CaseA.nii.gz", "CASEB.NII.GZ", "caseb_Segmentation.Nii", "CaseC.mha", "CaseD.nrrd")
    fill(tmp_path, "notes.txt", "other.nii", ".git/Case9.nii")
    cases = find_cases(tmp_path, site())
    assert found(cases) == ["CASEB", "CaseC", "CaseD"]
    assert cases.cases[0].masks == (tmp_path / "caseb_Segmentation.Nii",)
    assert reasons(cases)["._CaseA.nii.gz"] == "hidden"
    assert reasons(cases)[".git"] == "hidden"
    assert "no image pattern" in reasons(cases)["other.nii"]
    assert "NIfTI" in reasons(cases)["notes.txt"]


@pytest.mark.parametrize("name", ["UCL", "ucl", "D", "d"])
def test_folder_of_the_site_is_the_only_one_read(tmp_path: Path, name: str) -> None:
    fill(tmp_path, "Case0.nii.gz", f"{name}/Case1.nii.gz", "BIDMC/Case2.nii.gz")
    cases = find_cases(tmp_path, site(), [site("E", "BIDMC")])
    assert cases.folder == tmp_path / name
    assert found(cases) == ["Case1"]


def test_part_after_the_dash_names_a_folder_and_substrings_do_not(tmp_path: Path) -> None:
    fill(tmp_path, "JUN/Case1.nii.gz", "JUN2/Case2.nii.gz", "site1/Case3.nii.gz", "site10/Case4.nii.gz")
    assert found(find_cases(tmp_path, site("gm2018-JUN", "Juntendo"))) == ["Case1"]
    assert found(find_cases(tmp_path, site("site1", "X"))) == ["Case3"]


def test_two_folders_for_one_site_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, "D/Case1.nii.gz", "UCL/Case1.nii.gz")
    with pytest.raises(DataError, match="D and UCL"):
        find_cases(tmp_path, site())


def test_folders_of_other_sites_are_left_out(tmp_path: Path) -> None:
    fill(tmp_path, "x/Case1.nii.gz", "bidmc/Case2.nii.gz", "deep/E/Case3.nii.gz", "BIDMC2/Case4.nii.gz")
    cases = find_cases(tmp_path, site(), [site("E", "BIDMC")])
    assert found(cases) == ["BIDMC2/Case4", "x/Case1"]
    assert reasons(cases) == {"bidmc": "the folder of another site", "deep/E": "the folder of another site"}


def test_patient_folders_below_the_own_folder_are_never_another_site(tmp_path: Path) -> None:
    fill(tmp_path, "UCL/1/Case1.nii.gz", "UCL/2/Case1.nii.gz")
    others = [site("1", "X"), site("2", "Y")]
    assert found(find_cases(tmp_path, site(), others)) == ["1/Case1", "2/Case1"]
    assert found(find_cases(tmp_path / "UCL", site(), others)) == ["1/Case1", "2/Case1"]


def test_a_shared_name_is_the_own_folder(tmp_path: Path) -> None:
    fill(tmp_path, "UCL/Case1.nii.gz")
    assert found(find_cases(tmp_path, site("1", "UCL"), [site("gm2018-UCL", "UCL")])) == ["Case1"]


def record(folder: Path, content: str) -> None:
    (folder / "export.json").write_text(content, encoding="utf-8")


EXPORT = '{"notice": "For research use only.", "format": "itksnap", "files": {}}'


def test_exports_are_not_images(tmp_path: Path) -> None:
    fill(
        tmp_path,
        "Case1.nii.gz",
        "itksnap/Case1_mask.nii.gz",
        "itksnap/P/Case2_mask.nii.gz",
        "own/Case3.nii.gz",
    )
    record(tmp_path / "itksnap", EXPORT)
    record(tmp_path / "own", '{"cases": 1}')
    cases = find_cases(tmp_path, site())
    assert found(cases) == ["Case1", "own/Case3"]
    assert reasons(cases)["itksnap"] == "a folder of results"
    assert found(find_cases(tmp_path / "itksnap", site())) == ["Case1_mask", "P/Case2_mask"]


@pytest.mark.parametrize(
    "layer", [{"root": "labels", "pattern": "*_mask.nii.gz"}, {"pattern": "labels/*_mask.nii.gz"}]
)
def test_exports_may_hold_the_masks_that_a_pattern_names(tmp_path: Path, layer: dict[str, Any]) -> None:
    fill(tmp_path, "Case1.nii.gz", "labels/Case1_mask.nii.gz", "labels/Case2.nii.gz")
    record(tmp_path / "labels", EXPORT)
    files = {"image": ["Case*.nii.gz"], "masks": [{**layer, "write": 1}]}
    (case,) = find_cases(tmp_path, site(files=files)).cases
    assert case.masks == (tmp_path / "labels/Case1_mask.nii.gz",)


def test_earlier_results_are_not_images(tmp_path: Path) -> None:
    fill(tmp_path, "Case1.nii.gz", "runs/D/run.json", "runs/D/masks/Case1_mask.nii.gz")
    cases = find_cases(tmp_path, site())
    assert found(cases) == ["Case1"]
    assert reasons(cases) == {"runs/D": "a folder of results"}


def test_region_file_is_never_an_image_and_is_matched(tmp_path: Path) -> None:
    fill(tmp_path, "Case1.nii.gz", "Case1_cord.nii.gz", "Case2.nii.gz")
    config = site(region={"kind": "mask", "size_mm": 50, "pattern": "*_cord.nii.gz"})
    cases = find_cases(tmp_path, config)
    assert found(cases) == ["Case1", "Case2"]
    assert cases.cases[0].region_mask == tmp_path / "Case1_cord.nii.gz"
    assert cases.cases[1].region_mask is None


def test_same_name_in_two_formats_stops_with_the_list(tmp_path: Path) -> None:
    fill(tmp_path, "Casea.nii", "Casea.nii.gz", "Caseb.nii", "sub/Casea.nii")
    with pytest.raises(DataError, match=r"Casea\.nii and .*Casea\.nii\.gz") as caught:
        find_cases(tmp_path, site())
    assert "Caseb" not in str(caught.value)


def test_two_masks_for_one_layer_stop(tmp_path: Path) -> None:
    fill(tmp_path, "Case1.nii", "Case1_segmentation.nii", "Case1_segmentation.nii.gz")
    with pytest.raises(DataError, match="two masks"):
        find_cases(tmp_path, site())


def test_one_file_need_not_match_and_finds_its_masks(tmp_path: Path) -> None:
    fill(tmp_path, "scan.nii.gz", "scan_segmentation.nii.gz", "Case1.nii.gz", "Case1_segmentation.mha")
    cases = find_cases(tmp_path / "scan.nii.gz", site())
    assert found(cases) == ["scan"]
    assert cases.cases[0].masks == (tmp_path / "scan_segmentation.nii.gz",)
    matching = find_cases(tmp_path / "Case1.nii.gz", site())
    assert matching.cases[0].masks == (tmp_path / "Case1_segmentation.mha",)
    with pytest.raises(DataError, match="mask"):
        find_cases(tmp_path / "scan_segmentation.nii.gz", site())


def test_one_file_is_not_stopped_by_a_neighbour(tmp_path: Path) -> None:
    fill(tmp_path, "Case1.nii", "Case2_segmentation.nii", "Case2_segmentation.nii.gz")
    assert found(find_cases(tmp_path / "Case1.nii", site())) == ["Case1"]


def test_one_file_of_another_kind(tmp_path: Path) -> None:
    fill(tmp_path, "a.dcm")
    with pytest.raises(DataError, match=r"a\.dcm.*NIfTI.*MetaImage.*NRRD"):
        find_cases(tmp_path / "a.dcm", site())


def test_missing_and_empty_places(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        find_cases(tmp_path / "nowhere", site())
    with pytest.raises(DataError, match=r"Case\*\.nii\.gz.*no files"):
        find_cases(tmp_path, site())


def test_nothing_matches_says_what_is_there(tmp_path: Path) -> None:
    fill(tmp_path, "a.NII.gz", "b.nii.gz", "t.txt", "BIDMC/Case1.nii.gz", ".h")
    with pytest.raises(DataError) as caught:
        find_cases(tmp_path, site(), [site("E", "BIDMC")])
    text = str(caught.value)
    for part in (
        str(tmp_path),
        "Case*.nii.gz",
        "2 .nii.gz",
        "1 .txt",
        "b.nii.gz",
        "another site",
        "1 x hidden",
    ):
        assert part in text
    assert "DICOM" not in text
    assert "\n" not in text


def test_dicom_only_names_the_readable_formats(tmp_path: Path) -> None:
    fill(tmp_path, "s/1.dcm", "s/2.DCM")
    with pytest.raises(DataError, match=r"2 \.dcm.*DICOM.*NIfTI.*MetaImage.*NRRD"):
        find_cases(tmp_path, site())


def test_link_loops_end_and_each_folder_is_read_once(tmp_path: Path) -> None:
    fill(tmp_path, "a/Case1.nii.gz")
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "0link").symlink_to(tmp_path / "a", target_is_directory=True)
    (tmp_path / "Case9.nii.gz").symlink_to(tmp_path / "gone.nii.gz")
    cases = find_cases(tmp_path, site())
    assert found(cases) == ["a/Case1", "Case9"]  # what is missing fails by name when it is read
    assert set(reasons(cases)) == {"a/loop", "0link"}


def test_links_to_folders_and_files_are_followed(tmp_path: Path) -> None:
    fill(tmp_path, "store/Case1.nii.gz", "store/scan.nii.gz")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "p1").symlink_to(tmp_path / "store", target_is_directory=True)
    (tmp_path / "in" / "Case2.nii.gz").symlink_to(tmp_path / "store" / "scan.nii.gz")
    assert found(find_cases(tmp_path / "in", site())) == ["Case2", "p1/Case1"]


def test_accents_cjk_and_spaces(tmp_path: Path) -> None:
    fill(tmp_path, "Mü 画像/Case ä.nii.gz", "Mü 画像/Case ä_segmentation.nii.gz")
    cases = find_cases(tmp_path, site())
    assert found(cases) == ["Mü 画像/Case ä"]
    assert cases.cases[0].labelled


def test_several_image_patterns(tmp_path: Path) -> None:
    fill(tmp_path, "T2_1.nii", "x-adc.nii", "T2_1_segmentation.nii", "x_segmentation.nii")
    files = Files.model_validate({"image": ["T2*", "*-adc"], "masks": [{"pattern": "*_segmentation"}]})
    cases = find_cases(tmp_path, site().model_copy(update={"files": files}))
    assert [(case.name, case.labelled) for case in cases.cases] == [("T2_1", True), ("x-adc", True)]


@pytest.mark.shared
def test_development_data(shared: Path) -> None:
    from tesla_med.config.files import load_site

    others = [load_site(item, "prostate") for item in "ABCEF"]
    cases = find_cases(shared / "data" / "prostate", load_site("D", "prostate"), others)
    assert len(cases.cases) == 13
    assert all(case.labelled for case in cases.cases)
    cord = find_cases(shared / "data" / "spinal_cord", load_site("gm2018-CEI", "spinal_cord"))
    assert found(cord) == ["sub-10062Ses1_T2starw", "sub-10062Ses2_T2starw"]
    assert all(case.labelled and case.region_mask == case.masks[0] for case in cord.cases)


def test_without_patterns_masks_beside_their_images_are_no_images(tmp_path: Path, caplog) -> None:
    names = ("a/P1.nii.gz", "a/P1_Segmentation.nii.gz", "a/P2.nii.gz", "a/P2-seg.nrrd", "b/P3_label.nii.gz")
    more = (
        "b/P1_mask.nii.gz",
        "T1_ref.nii",
        "T1_ref_seg.nii",
        "T1.nii",
        "T1_manual.nii",
        "P4.nii",
        "P4_seg_mask.nii",
    )
    fill(tmp_path, *names, *more)
    cases = find_cases(tmp_path, site("any", "", files={"image": ["*"]}))
    left = {"a/P1_Segmentation.nii.gz", "a/P2-seg.nrrd", "T1_ref_seg.nii", "P4_seg_mask.nii"}
    assert reasons(cases) == dict.fromkeys(left, "the mask of another image, by its name")
    alone = {"b/P1_mask", "b/P3_label"}  # no image lies beside them
    assert set(found(cases)) == {"a/P1", "a/P2", "T1", "T1_ref", "T1_manual", "P4"} | alone
    assert "4 files are left out as the mask of another image, such as" in caplog.text
    assert any("site.files.image" in text for text in cases.remarks)
    named = find_cases(tmp_path, site("any", "", files={"image": ["P*.nii.gz"]}))
    assert "a/P1_Segmentation" in found(named)  # what patterns say counts


def test_further_channels_that_would_be_cases_or_miss_their_first_are_remarked_on(tmp_path: Path) -> None:
    fill(tmp_path, "P1_0000.nii.gz", "P1_0001.nii.gz", "P2_0001.nii.gz")
    alone = find_cases(tmp_path, site("any", "", files={"image": ["*"]}))
    assert len(alone.cases) == 3
    (text,) = alone.remarks
    assert text.startswith(f"1 of 3 images, such as {tmp_path / 'P1_0001.nii.gz'}, may be further channels")
    assert find_cases(tmp_path, site("any", "", files={"image": ["*_0000.nii.gz"]})).remarks == ()
    fill(tmp_path / "many", *(f"patient_{number:04d}.nii.gz" for number in range(8)))
    assert find_cases(tmp_path / "many", site("any", "", files={"image": ["*"]})).remarks == ()
    (tmp_path / "many").rename(tmp_path.parent / f"{tmp_path.name}-many")
    both = site("any", "", files={"image": ["*_0000.nii.gz", "*_0001.nii.gz"]})
    cases = find_cases(tmp_path, both, channels=2)
    assert found(cases) == ["P1_0000"]
    assert cases.remarks == (
        f"1 file is a further channel without the first, such as {tmp_path / 'P2_0001.nii.gz'}; "
        "its case is left out",
    )


def test_a_channel_that_the_model_does_not_take_is_remarked_on(tmp_path: Path) -> None:
    fill(tmp_path, "P1_0000.nii.gz", "P1_0001.nii.gz", "P1_0002.nii.gz", "P3_0002.nii.gz")
    both = site("any", "", files={"image": ["*_0000.nii.gz", "*_0001.nii.gz"]})
    cases = find_cases(tmp_path, both, channels=2)
    assert found(cases) == ["P1_0000"]
    assert reasons(cases) == {
        "P1_0002.nii.gz": "a further channel than the model takes",
        "P3_0002.nii.gz": "matches no image pattern of the site",  # there is no P3_0000
    }
    (text,) = cases.remarks
    assert text == (
        f"1 file is a further channel than the model takes, such as {tmp_path / 'P1_0002.nii.gz'}; "
        "it is not used; is it the right model?"
    )


def test_a_folder_called_after_another_site_is_remarked_on(tmp_path: Path, caplog) -> None:
    fill(tmp_path, "BIDMC/Case01.nii.gz", "other/Case01.nii.gz")
    others = [site("E", "BIDMC")]
    cases = find_cases(tmp_path / "BIDMC", site(), others)
    assert cases.remarks == (
        f"the folder {tmp_path / 'BIDMC'} is called after another site, E; is it the right one?",
    )
    assert "is it the right one?" in caplog.text
    assert find_cases(tmp_path / "other", site(), others).remarks == ()
    assert find_cases(tmp_path / "BIDMC", site("E", "BIDMC"), [site()]).remarks == ()


def test_of_folders_of_other_sites_alone_it_is_said_where_images_are_expected(tmp_path: Path) -> None:
    fill(tmp_path, "BIDMC/Case01.nii.gz")
    with pytest.raises(DataError, match=r"in it, or in a folder UCL in it; left out: 1 x the folder of"):
        find_cases(tmp_path, site(), [site("E", "BIDMC")])
    own = tmp_path / "UCL"
    fill(own, "run/run.json")
    with pytest.raises(DataError, match=r"no files of its own; left out: 1 x a folder of results"):
        find_cases(own, site())
