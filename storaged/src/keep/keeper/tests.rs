//! What a keeper does when a daemon has ended, and how long it waits.

use super::*;

#[test]
fn a_daemon_that_dies_of_its_start_is_started_ever_less_often() {
    let mut pause = Pause { next: PAUSE_MIN };
    let mut after = |lived| pause.after(Duration::from_secs(lived)).as_millis();
    let waits = [0; 8].map(&mut after);
    assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
    assert_eq!([after(59), after(60), after(0)], [5000, 100, 200]);
}

#[test]
fn a_code_says_how_a_process_ended() {
    for (raw, code) in [(0, 0), (75 << 8, 75), (9, 137), (15, 143)] {
        assert_eq!(code_of(ExitStatus::from_raw(raw)), code, "{raw}");
    }
}

/// What the keeper does after an end.
async fn then(raw: i32, change: impl FnOnce(&mut KeeperProcess, &mut Death)) -> Then {
    let program = Program::of_this_process().unwrap();
    let mut process = KeeperProcess::over(program, None).unwrap();
    let mut death = Death {
        status: ExitStatus::from_raw(raw),
        lived: Duration::ZERO,
        was_told_again: false,
    };
    change(&mut process, &mut death);
    process.then(&death, 0)
}

/// A file that was written in half at the moment of a crash must not cost the memory.
#[tokio::test]
async fn a_configuration_that_cannot_be_used_ends_nothing_while_memory_is_held() {
    let program = Program::of_this_process().unwrap();
    let mut process = KeeperProcess::over(program, None).unwrap();
    let death = Death {
        status: ExitStatus::from_raw(UNUSABLE << 8),
        lived: Duration::ZERO,
        was_told_again: false,
    };
    assert_eq!(process.then(&death, 1), Then::Start(PAUSE_MIN));
    assert_eq!(process.then(&death, 0), Then::End(78));
}

#[tokio::test]
async fn a_death_is_followed_by_a_start_and_an_end_by_the_keepers() {
    for code in FINAL {
        let end = Then::End(u8::try_from(code).unwrap());
        assert_eq!(then(code << 8, |_, _| {}).await, end);
    }
    for raw in [9, 15, 1 << 8, 74 << 8, 101 << 8] {
        assert_eq!(then(raw, |_, _| {}).await, Then::Start(PAUSE_MIN), "{raw}");
        let ending = |process: &mut KeeperProcess, _: &mut Death| process.is_ending = true;
        assert!(matches!(then(raw, ending).await, Then::End(_)), "{raw}");
        let again = |_: &mut KeeperProcess, death: &mut Death| death.was_told_again = true;
        assert_eq!(then(raw, again).await, Then::Start(Duration::ZERO), "{raw}");
    }
}

#[test]
fn a_program_is_looked_up_by_the_path_that_it_was_started_by() {
    let folder = tempfile::tempdir().unwrap();
    let (own, link) = (folder.path().join("storaged-1"), folder.path().join("link"));
    fs::write(&own, "").unwrap();
    std::os::unix::fs::symlink(&own, &link).unwrap();
    assert_eq!(path_as_named(&link, &own), Some(link.clone()));
    assert_eq!(path_as_named(Path::new("storaged-1"), &own), None);
    let other = folder.path().join("other");
    fs::write(&other, "").unwrap();
    assert_eq!(path_as_named(&other, &own), None);
}
