"""Names in certificates, and the octets of their keys."""

from __future__ import annotations

import ssl
import tempfile
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.certificates import make
from zonerelay.delivery.tls.dane import (
    fingerprint,
    is_sequence,
    matching_name,
    names_in,
    public_key,
    shown_names,
)


@pytest.mark.parametrize(
    ("wanted", "name", "fits"),
    [
        ("mx.example.com", "mx.example.com", True),
        ("MX.example.com.", "mx.example.com", True),
        ("mx.example.com", "*.example.com", True),
        ("a.mx.example.com", "*.example.com", False),  # one label, not two
        ("example.com", "*.example.com", False),
        (".example.com", "*.example.com", False),
        ("example.com", "*.com", False),
        ("mx.example.com", "m*.example.com", False),
        ("mx.example.com", "example.com", False),
        ("mx.example.com", "mx.example.com.evil.example", False),
        ("*.example.com", "mx.example.com", True),  # an operator's pattern
        ("*.example.com", "a.mx.example.com", True),
        ("*.example.com", "*.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com", "mx.badexample.com", False),
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "*.0.2.1", False),
        ("2001:db8::1", "2001:DB8:0:0:0:0:0:1", True),
        ("2001:db8::1", "2001:db8::2", False),
        ("2001:db8::1", "mx:example", False),
    ],
)
def test_names_fit_or_not(wanted: str, name: str, fits: bool) -> None:
    assert matching_name([wanted], [name]) == (wanted if fits else None)


def test_the_first_wanted_name_that_fits_is_told() -> None:
    assert matching_name(["a.example", "b.example"], ["c.example", "b.example", "a.example"]) == "a.example"
    assert matching_name([], ["a.example"]) is None
    assert matching_name(["a.example"], []) is None


def test_only_a_few_names_are_shown() -> None:
    assert shown_names([]) == "no name"
    assert shown_names(["a", "b"]) == "a, b"
    assert shown_names("abcdefg") == "a, b, c, d, e and 2 more"


def test_the_key_is_taken_out_as_it_is() -> None:
    for made in (make("a.example"), make("b.example", key=rsa.generate_private_key(65537, 2048))):
        assert public_key(made.der) == made.public_key_der
        assert fingerprint(made.der) == made.fingerprint


def test_no_octets_make_it_fail_otherwise_than_in_words() -> None:
    der = make("a.example").der
    assert is_sequence(der)
    for cut in range(len(der)):
        assert not is_sequence(der[:cut])
        for mangled in (der[:cut], der[:cut] + b"\xff" + der[cut + 1 :]):
            try:
                public_key(mangled)
            except ValueError:
                continue


def test_names_of_a_certificate_that_the_ssl_module_describes() -> None:
    made = make("MX.example.com", "*.example.net")
    with tempfile.NamedTemporaryFile() as file:
        file.write(made.pem)
        file.flush()
        # What `getpeercert` makes, from a file: there is no public way to ask for it.
        described = cast(Any, ssl)._ssl._test_decode_cert(file.name)
    assert names_in(described) == ("mx.example.com", "*.example.net")
    assert names_in({}) == ()
