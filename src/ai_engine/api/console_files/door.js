// Talking to the server: the key, JSON, and errors as people can read them.

const KEY = "ai-engine-key";

export const key = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (value) => sessionStorage.setItem(KEY, value.trim());

export function headers() {
  return key() ? { authorization: `Bearer ${key()}` } : {};
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The response of GET `path`; throws Refused with the server's own message. */
export async function get(path) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response;
}

export const getJson = async (path) => (await get(path)).json();
export const getText = async (path) => (await get(path)).text();

export async function refusal(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch { /* no JSON: the status says it */ }
  return new Refused(response.status, message);
}
