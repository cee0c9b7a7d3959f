"""The OpenAPI 3.1 description of `/v1/`, generated from the table of HTTP operations and their types.

Clients are generated from it. Some generators would send a default as a value, and a list whose `items` are
`false` breaks others, so neither is included. The description of a member states the default. Alternatives
are `oneOf`, from which openapi-generator makes TypeScript that compiles and takes strings. For that `to` is
described as an address, a list of addresses or a list of objects; the relay accepts more.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from zonerelay import __version__
from zonerelay.admin.api.verbs import JSON, Verb
from zonerelay.admin.problems import TYPE, ProblemBody

_REFUSALS = {
    "401": "No valid token was sent.",
    "403": "The scope of the token does not allow this request.",
    "406": "The response cannot be sent in any of the accepted media types.",
    "422": "The parameters or the body do not match the schema, or cannot be combined.",
    "429": "The client has sent too many invalid tokens.",
    "500": "An unexpected error occurred; the relay's log has the details.",
    "503": "Temporarily unavailable: the spool or a worker does not respond, or there are too many requests.",
}
_OF_BODIES = {
    "400": "The body is not JSON.",
    "408": "Timed out waiting for the request body.",
    "409": "The current state does not allow this request.",
    "413": "The body is too large.",
    "415": "The media type of the body is not supported.",
}
_OF_MAIL = {
    "409": "A request with this key is still being processed.",
    "429": "A quota of the user is used up, or the client has sent too many invalid tokens.",
}
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    "description": "A request with the same key returns the first response; nothing is sent twice.",
}

_BINARY = {"type": "string", "format": "binary"}
MESSAGE_ID = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
SEGMENT = {"type": "string", "pattern": "^[0-9A-Za-z_-]{1,64}$"}


def document(verbs: Sequence[Verb]) -> bytes:
    types: list[Any] = [ProblemBody]
    for verb in verbs:
        types += [each for each in (verb.parameters, verb.body, verb.answer) if each is not None]
        types += [each for each in (verb.streams or {}).values() if each is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    found = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for verb in verbs:
        paths.setdefault(verb.path, {})[verb.method.lower()] = _operation(verb, found, components)
    paths["/v1/openapi.json"] = {
        "get": {
            "summary": "This description.",
            "operationId": "openapi",
            "tags": [_tag("/v1/openapi.json")],
            "security": [],
            "responses": {"200": _response("OpenAPI 3.1", "application/json", {"type": "object"})},
        }
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "servers": [{"url": "/", "description": "The relay that serves this description."}],
            "tags": [{"name": name} for name in dict.fromkeys(map(_tag, paths))],
            "info": {
                "title": "zonerelay",
                "version": __version__,
                "description": "Requests of operators, named after the commands. Times are in Unix seconds.",
            },
            "security": [{"token": []}],
            "paths": _for_clients(paths),
            "components": {
                "schemas": _for_clients(components),
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _tag(path: str) -> str:
    return path.removeprefix("/v1").split("/")[1].partition(".")[0].partition("-")[0]


def _for_clients(part: Any, *, members: bool = False) -> Any:
    """Return a part of the OpenAPI description without the constructs that client generators do not support.
    With `members`, its keys are the names of members, not keywords of a schema.
    """
    if isinstance(part, list | tuple):
        return [_for_clients(each) for each in part]
    if not isinstance(part, dict):
        return part
    found = {
        name: _for_clients(each, members=name == "properties")
        for name, each in part.items()
        if members or name != "default"
    }
    if members:
        return found
    if "anyOf" in found:
        found |= _one_of(found.pop("anyOf"))
    if found.get("items") is False:
        found["items"] = _one_of(found.pop("prefixItems"))
    if found.pop("contentEncoding", None):
        found["format"] = "binary"
    if all(isinstance(each, str) for each in found.get("enum", (None,))):
        found["type"] = "string"
    return found


def _one_of(kinds: Sequence[Any]) -> dict[str, Any]:
    """Combine schemas with `oneOf`, after removing `format` and schemas that match the same values. A list of
    several types becomes one list per type.
    """
    lists = [{**kind, "items": item} for kind in kinds for item in kind.get("items", {}).get("oneOf", ())]
    listed = [each["items"] for each in lists if "$ref" in each["items"]]
    found: list[dict[str, Any]] = []
    for kind in [each for each in kinds if "oneOf" not in each.get("items", {})] + lists:
        plain = {key: value for key, value in kind.items() if key != "format"}
        if plain not in [*found, *listed]:
            found.append(plain)
    if {"type": "number"} in found and {"type": "integer"} in found:
        found.remove({"type": "integer"})
    return found[0] if len(found) == 1 else {"oneOf": found}


def _operation(verb: Verb, found: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    refusals = dict(_REFUSALS)
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": MESSAGE_ID if name == "message_id" else SEGMENT,
        }
        for name in re.findall(r"{(\w+)}", verb.path)
    ]
    if parameters or verb.body is not None:
        refusals["404"] = "The requested object does not exist."
    query = components[verb.parameters.__name__]
    parameters += [
        {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
        for name, schema in query["properties"].items()
    ]
    schema = found.get(repr(verb.answer), {"type": "string"})
    if verb.media == "text/event-stream":
        schema = {
            "type": "string",
            "description": ("A stream of events. The data of each event is a frame of the type `kind`."),
        }
    operation: dict[str, Any] = {
        "summary": verb.summary,
        "description": f"Scope: {verb.scope}{f' or {verb.also}' if verb.also else ''}.",
        "operationId": verb.name
        or re.sub(r"\W+", "_", f"{verb.method.lower()}{verb.path.removeprefix('/v1')}").strip("_"),
        "parameters": parameters,
        "tags": [_tag(verb.path)],
    }
    content = verb.streams if verb.body is None else {JSON: verb.body}
    if content is not None:
        refusals |= _OF_BODIES
        bodies = {
            media: {"schema": _BINARY if of is None else found[repr(of)]} for media, of in content.items()
        }
        operation["requestBody"] = {"required": True, "content": bodies}
    if verb.streams is not None:
        refusals |= _OF_MAIL
        parameters.append(_KEY)
    if verb.scope != "read":
        refusals["409"] = _OF_BODIES["409"]
    problem = found[repr(ProblemBody)]
    operation["responses"] = {
        str(verb.success): _response("Done.", verb.media, schema),
        **{status: _response(text, TYPE, problem) for status, text in sorted(refusals.items())},
    }
    return operation


def _response(text: str, media: str, schema: object) -> dict[str, Any]:
    return {"description": text, "content": {media: {"schema": schema}}}
