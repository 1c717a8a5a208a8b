// The token that the controller asks for. It goes into a cookie that no script reads.

import { post } from "/page/api.js";
import { Failure, html, useState } from "/page/ui.js";

export function LoginView({ onDone }) {
  const [token, setToken] = useState("");
  const [error, setError] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    try {
      await post(["login"], { token });
      onDone();
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<form class="login" onSubmit=${submit}>
    <h1>Log in</h1>
    <p>This controller asks for a token. <code>outlast tokens add</code> makes one.</p>
    <label for="token">Token</label>
    <input id="token" type="password" autocomplete="current-password" autofocus
      value=${token} onInput=${(event) => setToken(event.target.value)} />
    <${Failure} error=${error} />
    <button type="submit" disabled=${!token}>Log in</button>
  </form>`;
}
