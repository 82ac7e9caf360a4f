"use strict";
// Blocks of the page: base64 of a zlib stream.

const Unpack = {
  bytesOf(text) {
    if (Uint8Array.fromBase64) {
      return Uint8Array.fromBase64(text);
    }
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) {
      bytes[i] = raw.charCodeAt(i);
    }
    return bytes;
  },

  /** The content of a block; the element is emptied, since nobody reads it twice. */
  async bytes(id) {
    const element = document.getElementById(id);
    const packed = Unpack.bytesOf(element.textContent);
    element.textContent = "";
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  },

  async text(id) {
    return new TextDecoder().decode(await Unpack.bytes(id));
  },

  async json(id) {
    return JSON.parse(await Unpack.text(id));
  },

  /** Runs the script of a block. */
  async script(id) {
    const script = document.createElement("script");
    script.textContent = await Unpack.text(id);
    document.head.append(script);
  },
};
