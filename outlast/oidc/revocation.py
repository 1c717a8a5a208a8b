"""The end of a login at its issuer: the refresh token counts no more (RFC 7009)."""

from __future__ import annotations

from outlast.errors import OutlastError
from outlast.oidc.http import Web
from outlast.oidc.issuer import Session, refusal_in, revoking


def why_not_ended(session: Session) -> str:
    """Have the issuer end a login; why it goes on there, or "" when it has ended."""
    if not session.refresh_token:
        return "it gave no refresh token that could be taken back"
    try:
        web = Web(session.client.ca)
        request = revoking(session, web.endpoints(session.client.issuer))
        if request is None:
            return "it has no endpoint for that (revocation_endpoint)"
        answer = web.post(request, may_be_empty=True)
    except OutlastError as error:
        return str(error)
    return "" if answer.status == 200 else refusal_in(answer)
