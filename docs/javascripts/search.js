// Questions as users type them. The theme searches each word as the beginning of others, so that "do" and "the" would
// find "Document" and "there": these words are not sent to its worker.
(() => {
  const words = new Set(
    ("a an and are be can could did do does for from had has have how i if in is it its me my of on or should so than " +
      "that the their them then there these they this those to was we what when where which who will with would you your").split(" "),
  );
  const post = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...rest) {
    if (message && message.type === 2 && typeof message.data === "string") {
      const asked = message.data.split(/\s+/);
      const kept = asked.filter((word) => !words.has(word.toLowerCase().replace(/[?!.,]+$/, "")));
      if (kept.length > 0) message = { ...message, data: kept.join(" ") };
    }
    return post.call(this, message, ...rest);
  };
})();
