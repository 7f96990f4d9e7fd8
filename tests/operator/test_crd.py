from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from drover import spec
from drover.spec_file import load
from drover_operator import crd
from support.refused_specs import REFUSED, SPEC, Refused, changed

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = crd.schema()


def model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in getattr(annotation, "__args__", ()) if (found := model_in(part))), None)


def fields(model: type[BaseModel]) -> dict[str, Any]:
    """A model as the tree of its fields' names."""
    return {
        str(field.alias): fields(inner) if (inner := model_in(field.annotation)) else None
        for field in model.model_fields.values()
    }


def properties(schema: dict[str, Any]) -> dict[str, Any] | None:
    """A schema as the tree of its properties' names."""
    inner = schema.get("items", schema)
    return {name: properties(field) for name, field in inner["properties"].items()} if "properties" in inner else None


def parts(schema: dict[str, Any], place: str = "") -> list[tuple[str, dict[str, Any]]]:
    inner = schema.get("properties", {}) | ({"[]": schema["items"]} if "items" in schema else {})
    inner |= {"*": schema["additionalProperties"]} if "additionalProperties" in schema else {}
    return [(place, schema), *(part for name, field in inner.items() for part in parts(field, f"{place}.{name}"))]


def test_the_file_is_not_stale() -> None:
    """`make manifests` writes it."""
    assert yaml.safe_load((ROOT / "manifests/crd.yaml").read_text()) == crd.definition()


def test_properties_are_the_fields_of_the_spec() -> None:
    assert properties(SCHEMA["properties"]["spec"]) == fields(spec.Spec)


def test_every_part_is_structural() -> None:
    for place, part in parts(SCHEMA):
        assert not {"$ref", "allOf", "oneOf", "title", "nullable", "const"} & part.keys(), place
        assert ("type" in part) != part.get("x-kubernetes-int-or-string", False), place


def test_every_field_is_described() -> None:
    named = [(place, part) for place, part in parts(SCHEMA["properties"]["spec"]) if place[-1:] not in ("]", "*", "")]
    assert [place for place, part in named if not part.get("description")] == []
    assert [place for place, part in named if "\n" in part["description"]] == []


def test_lists_and_texts_are_bounded_so_that_rules_have_a_cost() -> None:
    for place, part in parts(SCHEMA["properties"]["spec"]):
        if part.get("type") == "string" and "enum" not in part:
            assert "maxLength" in part, place
        if part.get("type") == "array":
            assert "maxItems" in part, place


def test_defaults_are_those_of_the_spec() -> None:
    """What the API server fills in is what the models would."""
    least = {"model": {"source": "pvc://c/m.gguf"}, "workers": [{"name": "a"}, {"name": "b", "cache": {"size": "1Gi"}}]}
    filled = filled_in(SCHEMA["properties"]["spec"], least)
    assert spec.Spec.model_validate(filled) == spec.Spec.model_validate(least)
    assert filled["workers"][0]["cache"] == {"enabled": False, "accessMode": "ReadWriteOnce", "retain": True}
    assert filled["serving"]["port"] == 8080
    assert filled["workers"][1]["cache"]["enabled"] is True


def filled_in(schema: dict[str, Any], value: Any) -> Any:
    """As the API server does: a default stands in for what is missing, and is then filled in itself."""
    if isinstance(value, list):
        return [filled_in(schema["items"], item) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    given = {name: field["default"] for name, field in schema["properties"].items() if "default" in field} | value
    return {name: filled_in(schema["properties"][name], inner) for name, inner in given.items()}


def test_a_default_is_written_out_whole() -> None:
    """The API server tries the rules on a default before it fills in what is inside."""
    for place, part in parts(SCHEMA):
        if isinstance(part.get("default"), dict):
            assert filled_in(part, part["default"]) == part["default"], place


@pytest.mark.parametrize("rule", crd.RULES, ids=lambda rule: f"{rule.place}{rule.field}: {rule.rule[:40]}")
def test_rules_point_at_what_is_there(rule: crd.Rule) -> None:
    here = crd._at(SCHEMA, rule.place)
    for step in filter(None, rule.field.split(".")):
        here = here["properties"][step]
    assert rule.words
    assert rule.rule.count("(") == rule.rule.count(")")


def test_a_sample_for_a_cluster_fits_the_schema() -> None:
    for path in sorted((ROOT / "manifests/samples").glob("*.yaml")):
        given = load(path).spec.model_dump(by_alias=True, exclude_unset=True, mode="json")
        assert filled_in(SCHEMA["properties"]["spec"], given)


@pytest.mark.parametrize("row", [row for row in REFUSED if row.everywhere], ids=lambda row: f"{row.path}={row.value}")
def test_what_the_api_server_refuses_on_every_machine_the_models_refuse_too(row: Refused) -> None:
    spec.Spec.model_validate(SPEC)
    with pytest.raises(ValidationError):
        spec.Spec.model_validate(changed(row))
